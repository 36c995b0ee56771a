// A linear map by several tiles and rows at a time, whose sums are all in registers. Included by a file
// that says in `kTakes` what is multiplied with weights of each format, and has `products_of_bf16` for
// those that are not multiplied in whole numbers.

namespace palmette {
namespace {

// `expanded`: of b12, where the first rows leave the tiles as bf16 has them for the others, or null.
template <Format format, int R, int T>
inline void several_tiles(const Linear& linear, uint8_t* expanded, const uint8_t* x, int64_t ldx,
                       const float* sums, bool is_first, float* y, int64_t ldy, int64_t tile,
                       Ending ending) {
    constexpr Input input = kTakes[static_cast<int>(format)];
    const int64_t size = linear.tile_size, lds = num_sums(input, linear.k);
    const uint8_t* w = linear.weight + tile * size;
    __m512 found[R][T];
    if constexpr (input == Input::i8) {
        bytes_of_few_bits<format, R, T>(w, size, linear.k, reinterpret_cast<const int8_t*>(x), ldx,
                                        sums, lds, is_first, found);
    } else if constexpr (input == Input::i16) {
        pairs_of_bytes<format, R, T>(w, size, linear.k, reinterpret_cast<const int16_t*>(x), ldx,
                                     sums, lds, is_first, found);
    } else {
        products_of_bf16<format, R, T>(w, size, linear.k, x, ldx, is_first, expanded, found);
    }
    if (linear.bias) {
        PALMETTE_UNROLLED (int t = 0; t < T; ++t) {
            const __m512 bias = _mm512_loadu_ps(linear.bias + (tile + t) * kTile);
            PALMETTE_UNROLLED (int r = 0; r < R; ++r) found[r][t] = _mm512_add_ps(found[r][t], bias);
        }
    }
    PALMETTE_UNROLLED (int r = 0; r < R; ++r) {
        if (ending == Ending::gated) {
            PALMETTE_UNROLLED (int t = 0; t + 1 < T; t += 2) {
                store(y + r * ldy + (tile + t) / 2 * kTile,
                      silu(floats_of(found[r][t])) * floats_of(found[r][t + 1]));
            }
            continue;
        }
        PALMETTE_UNROLLED (int t = 0; t < T; ++t) {
            float* at = y + r * ldy + (tile + t) * kTile;
            if (ending == Ending::add) found[r][t] = _mm512_add_ps(found[r][t], _mm512_loadu_ps(at));
            _mm512_storeu_ps(at, found[r][t]);
        }
    }
}

// The accumulators of so many rows and two tiles fit the registers, with what the loop takes besides.
template <Format format>
constexpr int kSeveralRows = format == Format::bf16 || format == Format::b12 ? 12
                          : has_offsets(format)                           ? 4
                                                                          : 6;

template <Format format>
void multiply_several_as(const Linear& linear, const Rows& rows, int64_t num_rows, float* y,
                       int64_t ldy, int64_t first_tile, int64_t last_tile, Ending ending) {
    constexpr Input input = kTakes[static_cast<int>(format)];
    const auto* inputs = static_cast<const uint8_t*>(rows.x);
    const int64_t lds = num_sums(input, linear.k);
    constexpr int most = kSeveralRows<format>;
    int64_t tile = first_tile;
    const bool is_expanded = format == Format::b12 && num_rows > most;
    struct alignas(64) Line {
        uint8_t bytes[64];
    };
    static thread_local std::vector<Line> lines;  // two tiles have one for each input
    if (is_expanded && lines.size() < static_cast<std::size_t>(linear.k))
        lines.resize(static_cast<std::size_t>(linear.k));
    uint8_t* const expanded = is_expanded ? lines.data()->bytes : nullptr;
    const auto run = [&](auto width) {
        constexpr int tiles = decltype(width)::value;
        for (int64_t row = 0; row < num_rows; row += most) {
            with_count<most>(num_rows - row, [&](auto count) {
                several_tiles<format, decltype(count)::value, tiles>(
                    linear, expanded, inputs + row * rows.ldx * size_of(input), rows.ldx,
                    rows.sums + row * lds, row == 0, y + row * ldy, ldy, tile, ending);
            });
        }
        tile += tiles;
    };
    while (tile + 2 <= last_tile) run(std::integral_constant<int, 2>());
    while (tile < last_tile) run(std::integral_constant<int, 1>());
}

}  // namespace
}  // namespace palmette
