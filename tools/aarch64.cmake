# Cross-compiles for aarch64 Linux against the Python that tools/aarch64_root.py unpacks.
set(root ${CMAKE_CURRENT_LIST_DIR}/../.cache/aarch64/root)
file(GLOB python_headers ${root}/usr/include/python3.*)

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
# Last, since the C library's headers come from the cross compiler; Debian's pyconfig.h includes a file from there.
set(CMAKE_CXX_FLAGS_INIT "-idirafter ${root}/usr/include")

# Programs of this machine, and packages too: pybind11 is headers.
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE NEVER)
# The interpreter that CMake finds is the one that builds; its headers and its name for modules are this machine's.
set(Python_INCLUDE_DIR ${python_headers})
string(REGEX REPLACE "^.*python3\\.([0-9]+)$" ".cpython-3\\1-aarch64-linux-gnu.so" PYTHON_MODULE_EXTENSION
       "${python_headers}")
