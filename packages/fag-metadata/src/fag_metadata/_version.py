"""Version of the distribution `fag-metadata`; the build reads it from here."""

__version__ = "0.1.0"
