/// The tiles of AMX in software: what csrc/cpu/gemm_amx-inl.hpp uses of them, after the operations in Intel's manual.
///
/// Where the instruction would fault, the process ends with a sentence; also if a thread ends with tiles configured.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fag::cpu {
namespace emulated {

/// What one thread has in its tile registers.
class TileFile {
public:
    ~TileFile() { require(!is_configured_, "a thread ends with its tiles configured"); }

    bool is_configured() const { return is_configured_; }

    /// LDTILECFG: 64 bytes, the palette, 15 that are zero here, the bytes in a row of each tile, the rows of each.
    void configure(const void* memory) {
        unsigned char config[64];
        std::memcpy(config, memory, sizeof config);
        require(config[0] == 1, "LDTILECFG: the palette must be 1");
        for (int i = 1; i < 16; ++i) require(config[i] == 0, "LDTILECFG: bytes 1 to 15 must be 0");
        for (int i = 16 + 2 * kTiles; i < 48; ++i) require(config[i] == 0, "LDTILECFG: there are 8 tiles");
        for (int i = 48 + kTiles; i < 64; ++i) require(config[i] == 0, "LDTILECFG: there are 8 tiles");
        for (int i = 0; i < kTiles; ++i) {
            Tile& tile = tiles_[i];
            tile.row_bytes = config[16 + 2 * i] + 256 * config[17 + 2 * i];
            tile.rows = config[48 + i];
            require(tile.row_bytes <= kRowBytes && tile.rows <= kRows, "LDTILECFG: a tile has 16 rows of 64 bytes at most");
            require((tile.rows == 0) == (tile.row_bytes == 0), "LDTILECFG: a tile has both rows and columns or neither");
            std::memset(tile.bytes, 0, sizeof tile.bytes);
        }
        is_configured_ = true;
    }

    /// TILERELEASE
    void release() { is_configured_ = false; }

    /// TILEZERO
    void zero(int at) { std::memset(usable(at).bytes, 0, sizeof(Tile::bytes)); }

    /// TILELOADD; rows and columns beyond the tile's become zero.
    void load(int at, const void* base, std::int64_t stride) {
        zero(at);
        Tile& tile = usable(at);
        for (int row = 0; row < tile.rows; ++row) {
            std::memcpy(tile.bytes[row], static_cast<const char*>(base) + row * stride, tile.row_bytes);
        }
    }

    /// TILESTORED
    void store(int at, void* base, std::int64_t stride) {
        const Tile& tile = usable(at);
        for (int row = 0; row < tile.rows; ++row) {
            std::memcpy(static_cast<char*>(base) + row * stride, tile.bytes[row], tile.row_bytes);
        }
    }

    /// TDPBF16PS: the sums of even and of odd products apart, by fused multiply-adds from zero, then both together to C;
    /// rounded to nearest even, subnormal numbers count as zero before and after each step.
    void dot(int c_at, int a_at, int b_at) {
        require(c_at != a_at && c_at != b_at && a_at != b_at, "TDPBF16PS: its tiles must be three");
        Tile& c = usable(c_at);
        const Tile &a = usable(a_at), &b = usable(b_at);
        require(c.row_bytes % 4 == 0 && a.row_bytes % 4 == 0 && b.row_bytes % 4 == 0, "TDPBF16PS: rows must be whole words");
        require(c.rows == a.rows, "TDPBF16PS: C and A must have the same rows");
        require(c.row_bytes == b.row_bytes, "TDPBF16PS: C and B must have the same columns");
        require(a.row_bytes / 4 == b.rows, "TDPBF16PS: A must have as many words in a row as B has rows");
        for (int row = 0; row < c.rows; ++row) {
            for (int half = 0; half < kRowBytes; half += kLanes * 4) {
                __m256 first = _mm256_setzero_ps(), second = first;
                for (int k = 0; k < b.rows; ++k) {
                    std::int32_t word;
                    std::memcpy(&word, a.bytes[row] + 4 * k, sizeof word);
                    const __m256i a_words = _mm256_set1_epi32(word);
                    const __m256i b_words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b.bytes[k] + half));
                    first = accumulate(first, _mm256_slli_epi32(a_words, 16), _mm256_slli_epi32(b_words, 16));
                    second = accumulate(second, upper(a_words), upper(b_words));
                }
                auto* sums = reinterpret_cast<float*>(c.bytes[row] + half);
                const __m256 both = flush(_mm256_add_ps(first, second));
                _mm256_storeu_ps(sums, flush(_mm256_add_ps(flush(_mm256_loadu_ps(sums)), both)));
            }
        }
        // What lies beyond C's columns was zero and stays so: B's are zero there.
    }

private:
    static constexpr int kTiles = 8, kRows = 16, kRowBytes = 64, kLanes = 8;

    struct Tile {
        int rows;
        int row_bytes;
        alignas(64) unsigned char bytes[kRows][kRowBytes];
    };

    static void require(bool holds, const char* sentence) {
        if (holds) return;
        std::fprintf(stderr, "emulated AMX: %s\n", sentence);
        std::abort();
    }

    Tile& usable(int at) {
        require(is_configured_, "a tile is used without a configuration");
        require(at >= 0 && at < kTiles, "there are 8 tiles");
        require(tiles_[at].rows > 0, "a tile is used that the configuration leaves out");
        return tiles_[at];
    }

    static __m256i upper(__m256i words) { return _mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000u))); }

    bool is_configured_ = false;
    Tile tiles_[kTiles] = {};
};

static inline TileFile& tile_file() {
    static thread_local TileFile file;
    return file;
}

}  // namespace emulated
}  // namespace fag::cpu

#if defined(FAG_TRAP_AMX)
#include "amx_trapped.hpp"
#else
// The compiler's are macros and functions of the same names.
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
namespace fag::cpu {

static inline void _tile_loadconfig(const void* config) { emulated::tile_file().configure(config); }
static inline void _tile_release() { emulated::tile_file().release(); }
static inline void _tile_zero(int tile) { emulated::tile_file().zero(tile); }
static inline void _tile_loadd(int tile, const void* base, std::int64_t stride) {
    emulated::tile_file().load(tile, base, stride);
}
static inline void _tile_stored(int tile, void* base, std::int64_t stride) {
    emulated::tile_file().store(tile, base, stride);
}
static inline void _tile_dpbf16ps(int c, int a, int b) { emulated::tile_file().dot(c, a, b); }

}  // namespace fag::cpu
#endif
