set(FAG_TILING_SOURCES
  csrc/tiling/bind.cpp
)
