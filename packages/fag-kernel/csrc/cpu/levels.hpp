/// Which instruction-set level runs: the best this CPU and system support, capped from outside.
#pragma once

#include <string>
#include <vector>

#include "isa.hpp"

namespace fag::cpu {

/// Names of the levels this CPU can run, weakest first, capped by the environment variable FAG_CPU_LEVEL.
/// Throws std::invalid_argument if FAG_CPU_LEVEL names no level.
std::vector<std::string> available_levels();

/// Uses the named level from now on; an empty name goes back to the best one.
/// Throws std::invalid_argument unless the name is one of available_levels().
void set_level(const std::string& name);

/// The level in use.
const Isa& current_isa();

}  // namespace fag::cpu
