/// Which instruction-set level runs: the best this CPU and system support, capped from outside. A level may be left out of
/// that choice: it runs only where it is named, by set_level or as the cap.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "isa.hpp"

namespace fag::cpu {

/// Names of the levels this CPU can run, weakest first, also of those that run only where they are named; capped by the
/// environment variable FAG_CPU_LEVEL.
/// Throws std::invalid_argument if FAG_CPU_LEVEL names no level.
std::vector<std::string> available_levels();

/// Why those of available_levels() that run only where they are named do so.
std::map<std::string, std::string> levels_only_by_name();

/// Uses the named level from now on; an empty name goes back to the one chosen at first.
/// Throws std::invalid_argument unless the name is one of available_levels().
void set_level(const std::string& name);

/// The level in use.
const Isa& current_isa();

}  // namespace fag::cpu
