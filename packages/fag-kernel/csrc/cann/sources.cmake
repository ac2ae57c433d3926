set(FAG_CANN_SOURCES
  csrc/cann/aclnn.cpp
  csrc/cann/bind.cpp
  csrc/cann/launch.cpp
  csrc/cann/library.cpp
  csrc/cann/status.cpp
  csrc/cann/tensors.cpp
)
