/// What control.cpp offers to Python and the other parts provide.

#pragma once

#include <string>

namespace npu_stub {

// log.cpp: JSON texts, as stub.py documents them
std::string calls_json();
std::string live_json();
std::string syncs_json();
std::string violations_json();
void clear_calls();
void clear_violations();
double host_seconds();

// faults.cpp
void place_fault(const char* symbol, int code, const char* message, int after, int times);
void clear_faults();

// memory.cpp: compares every guard zone and every freed block with its pattern
void check_guards();

// devices.cpp
void set_soc_name(const char* name);
void set_device_count(int count);

// streams.cpp
void set_latency(int microseconds);
double work_seconds();
void wait_for_all_streams();

}  // namespace npu_stub
