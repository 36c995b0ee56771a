// A linear map by several tiles and rows at a time, whose sums are all in registers. Included by a file
// that says in `kTakes` what is multiplied with weights of each format, and has `products_of_bf16` for
// those that are not multiplied in whole numbers.

namespace palmette {
namespace {

// `expanded`: of weights of few bits, the tiles as bytes if there are `many` rows; of b12, where the first
// rows leave the tiles as bf16 has them for the others, or null.
template <Format format, bool many, int R, int T>
inline void several_tiles(const Linear& linear, uint8_t* expanded, const uint8_t* x, int64_t ldx,
                       const float* sums, bool is_first, float* y, int64_t ldy, int64_t tile,
                       Ending ending) {
    constexpr Input input = kTakes[static_cast<int>(format)];
    const int64_t size = linear.tile_size, lds = num_sums(input, linear.k);
    const uint8_t* w = linear.weight + tile * size;
    __m512 found[R][T];
    if constexpr (input == Input::i8 && many) {
        bytes_of_expanded<format, R, T>(expanded, w, size, linear.k, reinterpret_cast<const int8_t*>(x),
                                        ldx, sums, lds, found);
    } else if constexpr (input == Input::i8) {
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
template <Format format, bool many>
constexpr int kSeveralRows = format == Format::bf16 || format == Format::b12 ? 12
                             : has_offsets(format) && !many                  ? 4
                                                                             : 6;

constexpr int64_t kManyRows = 9;  // from so many on it pays to write few bits as bytes

// Room for two tiles of K inputs as bfloat16 has them, of this thread.
inline uint8_t* room_for_tiles(int64_t k) {
    struct alignas(64) Line {
        uint8_t bytes[64];
    };
    static thread_local std::vector<Line> lines;  // one for each input
    if (lines.size() < static_cast<std::size_t>(k)) lines.resize(static_cast<std::size_t>(k));
    return lines.data()->bytes;
}

template <Format format, bool many>
void multiply_rows_as(const Linear& linear, const Rows& rows, int64_t num_rows, float* y, int64_t ldy,
                      int64_t first_tile, int64_t last_tile, Ending ending) {
    constexpr Input input = kTakes[static_cast<int>(format)];
    const auto* inputs = static_cast<const uint8_t*>(rows.x);
    const int64_t lds = num_sums(input, linear.k);
    constexpr int most = kSeveralRows<format, many>;
    int64_t tile = first_tile;
    const bool is_expanded = many || (format == Format::b12 && num_rows > most);
    uint8_t* const expanded = is_expanded ? room_for_tiles(linear.k) : nullptr;
    const auto run = [&](auto width) {
        constexpr int tiles = decltype(width)::value;
        if constexpr (many) {
            const int64_t size = linear.tile_size;
            expand_few_bits<format, tiles>(linear.weight + tile * size, size, linear.k, expanded);
        }
        for (int64_t row = 0; row < num_rows; row += most) {
            with_count<most>(num_rows - row, [&](auto count) {
                several_tiles<format, many, decltype(count)::value, tiles>(
                    linear, expanded, inputs + row * rows.ldx * size_of(input), rows.ldx,
                    rows.sums + row * lds, row == 0, y + row * ldy, ldy, tile, ending);
            });
        }
        tile += tiles;
    };
    while (tile + 2 <= last_tile) run(std::integral_constant<int, 2>());
    while (tile < last_tile) run(std::integral_constant<int, 1>());
}

template <Format format>
void multiply_several_as(const Linear& linear, const Rows& rows, int64_t num_rows, float* y,
                         int64_t ldy, int64_t first_tile, int64_t last_tile, Ending ending) {
    auto run = multiply_rows_as<format, false>;
    if constexpr (kTakes[static_cast<int>(format)] == Input::i8) {
        if (num_rows >= kManyRows) run = multiply_rows_as<format, true>;
    }
    run(linear, rows, num_rows, y, ldy, first_tile, last_tile, ending);
}

}  // namespace
}  // namespace palmette
