# Compiled everywhere; bind.cpp defines fag::cpu::bind_cpu.
set(FAG_CPU_SOURCES
  csrc/cpu/backward.cpp
  csrc/cpu/backward_job.cpp
  csrc/cpu/backward_margins.cpp
  csrc/cpu/backward_schedule.cpp
  csrc/cpu/backward_tile.cpp
  csrc/cpu/backward_worker.cpp
  csrc/cpu/bind.cpp
  csrc/cpu/borrowed_threads.cpp
  csrc/cpu/careful.cpp
  csrc/cpu/forward.cpp
  csrc/cpu/forward_block.cpp
  csrc/cpu/forward_schedule.cpp
  csrc/cpu/forward_work.cpp
  csrc/cpu/grad_work.cpp
  csrc/cpu/isa_portable.cpp
  csrc/cpu/levels.cpp
  csrc/cpu/operands.cpp
  csrc/cpu/pool.cpp
  csrc/cpu/query_sums.cpp
  csrc/cpu/row_cache.cpp
  csrc/cpu/visible_rows.cpp
)
# Compiled on x86-64 only; the end of the name chooses the instruction set: _avx2, _avx512, _avx512_bf16, _amx_bf16.
set(FAG_CPU_X86_SOURCES
  csrc/cpu/isa_avx2.cpp
  csrc/cpu/isa_avx512.cpp
  csrc/cpu/isa_avx512_bf16.cpp
  csrc/cpu/isa_amx_bf16.cpp  # where the compiler knows AMX
)
# Compiled on aarch64 only; _neon, _neon_bf16.
set(FAG_CPU_AARCH64_SOURCES
  csrc/cpu/isa_neon.cpp
  csrc/cpu/isa_neon_bf16.cpp
)
