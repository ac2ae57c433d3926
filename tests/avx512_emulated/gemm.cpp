/// The product on AMX tiles, and mistakes with tiles, for test_gemm.py; avx512_emulated.hpp is included before.
#include <new>

#include "isa_amx_bf16.cpp"

/// True if it left tiles configured behind.
extern "C" bool gemm(const void* a, std::int64_t lda, const void* b, float* c, std::int64_t ldc, int m, int n, int k,
                     int merge, const float* start) {
    using namespace fag::cpu;
    const auto words = [](const void* p) { return static_cast<const Word*>(p); };
    isa_amx_bf16.bf16x2.gemm(
        {words(a), lda, words(b), c, ldc, m, n, k, static_cast<Merge>(merge), Ahead::nothing, start});
    return emulated::tile_file().is_configured();
}

/// Configures tiles of num_rows rows and groups of `words` words, and leaves it at that.
extern "C" void configure(int num_rows, int words) {
    using namespace fag::cpu::amx_bf16;
    alignas(Tiles) char tiles[sizeof(Tiles)];
    (new (tiles) Tiles)->configure(num_rows, words);
}

extern "C" void use(int c, int a, int b) { fag::cpu::emulated::tile_file().dot(c, a, b); }
