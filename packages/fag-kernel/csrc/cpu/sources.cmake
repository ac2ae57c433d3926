# Compiled everywhere; bind.cpp defines fag::cpu::bind_cpu.
set(FAG_CPU_SOURCES
)
# Compiled on x86-64 only; the end of the name chooses the instruction set: _avx2, _avx512, _avx512_bf16.
set(FAG_CPU_X86_SOURCES
)
