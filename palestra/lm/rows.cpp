// Passes over rows on the CPU, each in one go where torch's operations would take five to ten. `native.py` calls them.
//
// Rows are FP32 or bfloat16; arithmetic is FP32 and rounded once, to the nearest. What becomes of a row depends on
// that row alone.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

struct bf16 { uint16_t bits; };

static inline float wide(float x) { return x; }
static inline float wide(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline void put(float& to, float value) { to = value; }
static inline void put(bf16& to, float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to.bits = value != value ? 0x7fc0 : uint16_t(rounded);
}

// Numbers are worked on in blocks of FP32 that stay in the nearest cache: loops of one type become vectors.
constexpr int64_t BLOCK = 256;
template <class T> static inline void load(float* to, const T* from, int n) {
    #pragma omp simd
    for (int i = 0; i < n; i++) to[i] = wide(from[i]);
}
template <class T> static inline void store(T* to, const float* from, int n) {
    #pragma omp simd
    for (int i = 0; i < n; i++) put(to[i], from[i]);
}

// e^x to two units in the last place (Cephes' polynomial): a loop of it becomes vectors, which a call would not.
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounds to a whole number
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}
static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// The threads that torch's own operations use; not there where torch has another library for them.
extern "C" __attribute__((weak)) void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned flags);
extern "C" __attribute__((weak)) int omp_get_thread_num();
extern "C" __attribute__((weak)) int omp_get_num_threads();

// Calls work(begin, end, share) for shares of the rows, one a thread where there is enough to do.
template <class Work> static void shared_out(int64_t rows, int64_t width, int threads, Work work) {
    int64_t shares = std::min<int64_t>(rows * width >> 16, threads);
    if (shares < 2 || !GOMP_parallel) return work(0, rows, 0);
    std::pair<Work*, int64_t> job(&work, rows);
    auto mine = [](void* data) {
        auto [work, rows] = *static_cast<std::pair<Work*, int64_t>*>(data);
        int64_t share = omp_get_thread_num(), shares = omp_get_num_threads();  // maybe fewer than asked for
        (*work)(rows * share / shares, rows * (share + 1) / shares, int(share));
    };
    GOMP_parallel(mine, &job, unsigned(shares), 0);
}

// A view (outer, inner, width) whose last dimension is contiguous.
template <class T> struct Rows {
    T* data;
    int64_t inner, by_outer, by_inner;
    T* operator[](int64_t row) const { return data + row / inner * by_outer + row % inner * by_inner; }
};

// out = x · scale · weight, scale = 1 / √(mean of x² + eps)
template <class T> static void norm(Rows<T> x, const float* weight, float eps, T* out, float* scales, int64_t rows,
                                    int64_t width, int threads) {
    shared_out(rows, width, threads, [=](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; row++) {
            const T* from = x[row];
            T* to = out + row * width;
            float sum = 0;
            #pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < width; i++) sum += wide(from[i]) * wide(from[i]);
            float scale = scales[row] = 1.0f / std::sqrt(sum / width + eps);
            #pragma omp simd
            for (int64_t i = 0; i < width; i++) put(to[i], wide(from[i]) * scale * weight[i]);
        }
    });
}

// With x̂ = x · scale and ĝ = grad · weight: to_x = (ĝ − x̂ · mean(ĝ · x̂)) · scale, to_weight = Σ over rows of grad · x̂.
template <class T> static void norm_backward(const T* grads, Rows<T> x, const float* weight, const float* scales,
                                             T* to_x, float* to_weight, int64_t rows, int64_t width, int threads) {
    std::vector<float> sums(size_t(threads) * width, 0.0f);
    float* all = sums.data();
    shared_out(rows, width, threads, [=](int64_t begin, int64_t end, int share) {
        float* mine = all + share * width;
        for (int64_t row = begin; row < end; row++) {
            const T *from = x[row], *grad = grads + row * width;
            T* to = to_x + row * width;
            float scale = scales[row], dot = 0;
            #pragma omp simd reduction(+ : dot)
            for (int64_t i = 0; i < width; i++) {
                float product = wide(grad[i]) * wide(from[i]) * scale;
                mine[i] += product;
                dot += product * weight[i];
            }
            float mean = dot / width;
            #pragma omp simd
            for (int64_t i = 0; i < width; i++)
                put(to[i], (wide(grad[i]) * weight[i] - wide(from[i]) * scale * mean) * scale);
        }
    });
    for (int share = 0; share < threads; share++)
        for (int64_t i = 0; i < width; i++) to_weight[i] += all[share * width + i];
}

// Halves of a head are turned by the angles of its row: out = x · cos + (the other half) · sin · sign.
template <class T> static void turn(Rows<T> x, const float* cos, const float* sin, float sign, T* out, int64_t rows,
                                    int64_t width, int threads) {
    shared_out(rows, width, threads, [=](int64_t begin, int64_t end, int) {
        int64_t half = width / 2, token = begin / x.inner, head = begin % x.inner;
        for (int64_t row = begin; row < end; row++) {
            const T* from = x.data + token * x.by_outer + head * x.by_inner;
            T* to = out + row * width;
            const float *c = cos + token * width, *s = sin + token * width;
            if (++head == x.inner) head = 0, token++;
            #pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                float first = wide(from[i]), second = wide(from[i + half]);
                put(to[i], first * c[i] + second * s[i] * sign);
                put(to[i + half], second * c[i + half] + first * s[i + half] * sign);
            }
        }
    });
}

// out = SiLU(gate) · up
template <class T> static void gate(const T* both, T* out, int64_t rows, int64_t width, int threads) {
    shared_out(rows, width, threads, [=](int64_t begin, int64_t end, int) {
        float x[BLOCK], up[BLOCK], open[BLOCK];
        for (int64_t row = begin; row < end; row++)
            for (int64_t i = 0; i < width; i += BLOCK) {
                int n = int(std::min(BLOCK, width - i));
                const T* from = both + 2 * row * width + i;
                load(x, from, n);
                load(up, from + width, n);
                #pragma omp simd
                for (int k = 0; k < n; k++) open[k] = sigmoid(x[k]);
                #pragma omp simd
                for (int k = 0; k < n; k++) x[k] *= open[k] * up[k];
                store(out + row * width + i, x, n);
            }
    });
}

template <class T> static void gate_backward(const T* grads, const T* both, T* to_both, int64_t rows, int64_t width,
                                             int threads) {
    shared_out(rows, width, threads, [=](int64_t begin, int64_t end, int) {
        float x[BLOCK], up[BLOCK], grad[BLOCK];
        for (int64_t row = begin; row < end; row++)
            for (int64_t i = 0; i < width; i += BLOCK) {
                int n = int(std::min(BLOCK, width - i));
                int64_t place = 2 * row * width + i;
                load(x, both + place, n);
                load(up, both + place + width, n);
                load(grad, grads + row * width + i, n);
                #pragma omp simd
                for (int k = 0; k < n; k++) {
                    float open = sigmoid(x[k]), to_gate = grad[k] * up[k] * open * (1.0f + x[k] * (1.0f - open));
                    up[k] = grad[k] * x[k] * open;
                    x[k] = to_gate;
                }
                store(to_both + place, x, n);
                store(to_both + place + width, up, n);
            }
    });
}

static inline uint64_t mixed(uint64_t x) {  // SplitMix64
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int PANEL = 16, PARTS = PANEL / LANES, TILE = 4, HEIGHT = 64;
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Integers __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float Four __attribute__((vector_size(16), aligned(4)));

// The same e^x of all lanes at once, for x ≤ 0.
static inline Vector exponentials(Vector x) {
    x = x < -87.0f ? Vector{} - 87.0f : x;
    Vector whole = x * 1.44269504f + 12582912.0f, n = whole - 12582912.0f;
    Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f, p = Vector{} + 1.9875691500e-4f;
    for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = p * r + next;
    p = p * r * r + r + 1.0f;
    return p * (Vector)(((Integers)whole + 127) << 23);
}

// sum + a · b, rounded once: left to itself GCC rounds twice in some loops and once in others (for Sapphire Rapids it
// does without fused instructions where they form a chain), and a row would have other bits with other rows beside it.
static inline Vector fused(Vector a, float b, Vector sum) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, _mm512_set1_ps(b), (__m512)sum);
#elif defined(__AVX__) && defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)a, _mm256_set1_ps(b), (__m256)sum);
#else
    return sum + a * b;
#endif
}

// COUNT rows times a panel of 16 columns that lie side by side: each sum adds its products one after the other, whatever
// COUNT is. x has the first number of every row, then the second of every row, and so on; ARM multiplies a vector by an
// element of another. GCC keeps the sums in registers only if every loop over them is unrolled.
template <int COUNT> static void tile(const float* x, const float* panel, float* out, int64_t inputs,
                                      int64_t outputs, int rows, int columns) {
    constexpr int AHEAD = TILE / COUNT;
    Vector sums[COUNT][PARTS] = {};
    auto add = [&](int64_t k, int row, float value) {
        #pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++)
            sums[row][p] = fused(*reinterpret_cast<const Vector*>(panel + k * PANEL + p * LANES), value, sums[row][p]);
    };
    int64_t k = 0;
    for (; k + AHEAD <= inputs; k += AHEAD) {
        Four four = *reinterpret_cast<const Four*>(x + k * COUNT);
        #pragma GCC unroll 4
        for (int i = 0; i < TILE; i++) add(k + i / COUNT, i % COUNT, four[i]);
    }
    if (COUNT == 1)
        for (; k < inputs; k++) add(k, 0, x[k]);
    #pragma GCC unroll 4
    for (int row = 0; row < COUNT; row++) {
        float whole[PANEL], *to = columns == PANEL ? out + row * outputs : whole;
        if (row >= rows) break;
        #pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) *reinterpret_cast<Vector*>(to + p * LANES) = sums[row][p];
        if (to == whole) std::copy_n(whole, columns, out + row * outputs);
    }
}

// out (rows, outputs) = x (rows, inputs) · weight, the weight in panels (outputs / 16, inputs, 16). For any number
// of rows as fast as memory or arithmetic allow, and a row has the same bits in all.
extern "C" void product_fp32(const float* x, const float* weight, float* out, int64_t rows,
                             int64_t inputs, int64_t outputs, int threads) {
    int64_t panels = (outputs + PANEL - 1) / PANEL;
    shared_out(panels, 2 * rows * inputs, threads, [=](int64_t begin, int64_t end, int) {
        static thread_local std::vector<float> mixed;  // rows of x, four by four; a last one alone stays as it is
        mixed.resize(size_t(std::min<int64_t>(rows + TILE, HEIGHT)) * inputs);
        for (int64_t first = 0; first < rows; first += HEIGHT) {  // so many rows of x stay in the cache
            int64_t last = std::min(rows, first + HEIGHT);
            for (int64_t row = first; row + 1 < last; row += TILE)
                for (int64_t i = 0, count = std::min<int64_t>(TILE, last - row); i < TILE; i++)
                    for (int64_t k = 0; k < inputs; k++)
                        mixed[(row - first) * inputs + k * TILE + i] = i < count ? x[(row + i) * inputs + k] : 0;
            for (int64_t p = begin; p < end; p++) {
                const float* panel = weight + p * PANEL * inputs;
                int columns = int(std::min<int64_t>(PANEL, outputs - p * PANEL));
                for (int64_t row = first; row < last; row += TILE) {
                    float* to = out + row * outputs + p * PANEL;
                    if (row + 1 == last) tile<1>(x + row * inputs, panel, to, inputs, outputs, 1, columns);
                    else tile<TILE>(mixed.data() + (row - first) * inputs, panel, to, inputs, outputs, int(last - row), columns);
                }
            }
        }
    });
}

// One layer of a model, and what it has cached: keys and values (pages, page, kv heads, dim).
struct Layer {
    const float *attn_norm, *qkv, *bias, *q_norm, *k_norm, *o, *mlp_norm, *gate_up, *down;
    float *keys, *values;
    int64_t window;
};
struct Sizes { int64_t layers, width, heads, kv, dim, hidden, page, per_head, across; };

// Where a position of a sequence lies, of all positions of all pages.
static inline int64_t place(const int32_t* table, int64_t page, int64_t position) {
    return table[position / page] * page + position % page;
}

template <class T> static inline Vector wide_vector(const T* from) {
    if constexpr (std::is_same_v<T, float>) return *reinterpret_cast<const Vector*>(from);
    Vector to;
    #pragma GCC unroll 16
    for (int lane = 0; lane < LANES; lane++) to[lane] = wide(from[lane]);
    return to;
}

template <class T> static inline float dot(const float* a, const T* b, int64_t dim) {
    Vector sums = {};
    for (int64_t i = 0; i < dim; i += LANES) sums += *reinterpret_cast<const Vector*>(a + i) * wide_vector(b + i);
    float sum = 0;
    #pragma GCC unroll 16
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    return sum;
}

// sums (VECTORS · LANES numbers) += Σ of weights · values, which lie `apart`.
template <int VECTORS, class T> static void accumulate(const float* weights, const T* values, int64_t count,
                                                       int64_t apart, float* sums) {
    Vector parts[VECTORS];
    #pragma GCC unroll 8
    for (int p = 0; p < VECTORS; p++) parts[p] = *reinterpret_cast<const Vector*>(sums + p * LANES);
    for (int64_t j = 0; j < count; j++) {
        #pragma GCC unroll 8
        for (int p = 0; p < VECTORS; p++) parts[p] += wide_vector(values + j * apart + p * LANES) * weights[j];
    }
    #pragma GCC unroll 8
    for (int p = 0; p < VECTORS; p++) *reinterpret_cast<Vector*>(sums + p * LANES) = parts[p];
}

// out (rows, heads, dim) = softmax(q · keys / √dim) · values over the last `window` (0: all) of the first
// lengths[row] + 1 positions of each row's sequence. The rows of q and the table lie `q_apart` and `across`.
template <class T> static void attend(const T* q, int64_t q_apart, const T* keys, const T* values,
                                      const int64_t* lengths, const int32_t* tables, T* out, int64_t across,
                                      int64_t heads, int64_t kv, int64_t dim, int64_t page, int64_t window,
                                      int64_t rows, int threads) {
    int64_t group = heads / kv, apart = kv * dim, longest = *std::max_element(lengths, lengths + rows) + 1;
    shared_out(rows * kv, longest * dim * group, threads, [=](int64_t begin, int64_t end, int) {
        static thread_local std::vector<float> memory;
        memory.resize(size_t(group) * (longest + 2 * dim));
        float *scores = memory.data(), *queries = scores + group * longest, *sums = queries + group * dim;
        constexpr int WIDE = 8;
        float scale = 1.0f / std::sqrt(float(dim));
        for (int64_t unit = begin; unit < end; unit++) {
            int64_t row = unit / kv, head = unit % kv, seen = lengths[row] + 1;
            int64_t first = window && window < seen ? seen - window : 0, count = seen - first;
            const int32_t* table = tables + row * across;
            for (int64_t i = 0; i < group * dim; i++) {
                queries[i] = wide(q[row * q_apart + head * group * dim + i]);
                sums[i] = 0;
            }
            // The rest of a page at a time, whose keys all heads of the group read while they are near.
            for (int64_t at = first, n; at < seen; at += n) {
                n = std::min(page - at % page, seen - at);
                const T* from = keys + place(table, page, at) * apart + head * dim;
                for (int64_t g = 0; g < group; g++)
                    for (int64_t j = 0; j < n; j++)
                        scores[g * count + at - first + j] = dot(queries + g * dim, from + j * apart, dim) * scale;
            }
            for (int64_t g = 0; g < group; g++) {
                float *own = scores + g * count, most = -INFINITY, total = 0;
                for (int64_t j = 0; j < count; j++) most = std::max(most, own[j]);
                #pragma omp simd
                for (int64_t j = 0; j < count; j++) own[j] = exponential(own[j] - most);
                for (int64_t j = 0; j < count; j++) total += own[j];
                #pragma omp simd
                for (int64_t j = 0; j < count; j++) own[j] /= total;
            }
            for (int64_t at = first, n; at < seen; at += n) {
                n = std::min(page - at % page, seen - at);
                const T* from = values + place(table, page, at) * apart + head * dim;
                for (int64_t g = 0; g < group; g++) {
                    const float* own = scores + g * count + at - first;
                    int64_t i = 0;
                    for (; i + WIDE * LANES <= dim; i += WIDE * LANES) accumulate<WIDE>(own, from + i, n, apart, sums + g * dim + i);
                    for (; i < dim; i += LANES) accumulate<1>(own, from + i, n, apart, sums + g * dim + i);
                }
            }
            for (int64_t i = 0; i < group * dim; i++) put(out[unit * group * dim + i], sums[i]);
        }
    });
}

// Attention of sequences over themselves, where tokens that several begin with lie in memory once. Sequence s has the
// tokens of the ranges from bounds[s][0] up to bounds[s][1], (first, count) each; its last bounds[s][2] are queries, which
// are of the last range. A vector has LANES queries, which read the same key: none is idle but at the end, whatever a
// head's dimension. A query sees the last `window` (0: all) up to itself; `sinks`, where there are any, are scores of keys
// without values.
template <class T> static void tree(const T* q, const T* k, const T* v, const float* sinks, const int64_t* ranges,
                                    const int64_t* bounds, T* out, int64_t q_apart, int64_t k_apart, int64_t v_apart,
                                    int64_t heads, int64_t kv, int64_t dim, int64_t window, int64_t sequences,
                                    int threads) {
    constexpr int64_t KEYS = 64;
    constexpr int WIDE = 8;
    const Vector least = Vector{} - 1e30f;  // e to its power is 0 beside any score's
    struct Unit { int64_t sequence, head, lane; };
    std::vector<Unit> units;
    int64_t group = heads / kv, longest = 0, reach = window ? window : int64_t(1) << 30;
    for (int64_t s = 0; s < sequences; s++) {
        int64_t length = 0;
        for (int64_t r = bounds[3 * s]; r < bounds[3 * s + 1]; r++) length += ranges[2 * r + 1];
        longest = std::max(longest, length);
        for (int64_t head = 0; head < kv; head++)
            for (int64_t lane = 0; lane < bounds[3 * s + 2] * group; lane += LANES) units.push_back({s, head, lane});
    }
    shared_out(int64_t(units.size()), longest * dim * LANES, threads, [&](int64_t begin, int64_t end, int) {
        static thread_local std::vector<float> memory;
        memory.resize(size_t(2 * (longest + WIDE) + 2 * LANES) * dim + (KEYS + 1) * LANES);
        float* scores = memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) / 4 & (LANES - 1));  // aligned
        float *queries = scores + KEYS * LANES, *sums = queries + LANES * dim, *keys = sums + LANES * dim;
        float *values = keys + (longest + WIDE) * dim, scale = 1.0f / std::sqrt(float(dim));
        Vector *rows = reinterpret_cast<Vector*>(scores), *parts = reinterpret_cast<Vector*>(sums);
        int64_t length = 0, asked = 0, start = 0;
        for (int64_t u = begin; u < end; u++) {
            auto [sequence, head, lane] = units[u];
            if (u == begin || sequence != units[u - 1].sequence || head != units[u - 1].head) {
                length = 0;
                for (int64_t r = bounds[3 * sequence]; r < bounds[3 * sequence + 1]; r++) {
                    start = ranges[2 * r] + ranges[2 * r + 1];
                    for (int64_t t = ranges[2 * r]; t < start; t++, length++) {
                        load(keys + length * dim, k + t * k_apart + head * dim, int(dim));
                        load(values + length * dim, v + t * v_apart + head * dim, int(dim));
                    }
                }
                asked = bounds[3 * sequence + 2];
                start -= asked;
            }
            // Lanes are the heads of the first query's group, then those of the next; some of the last are left over.
            int64_t lanes = std::min<int64_t>(LANES, asked * group - lane), nearest = length - asked + lane / group;
            int64_t from[LANES], to[LANES];
            Integers position;
            Vector most = least, total = {};
            for (int64_t i = 0, token = lane / group, g = lane % group; i < LANES; i++) {
                int64_t t = i < lanes ? token : lane / group, h = head * group + (i < lanes ? g : 0);
                position[i] = int(length - asked + t);
                from[i] = (start + t) * q_apart + h * dim;
                to[i] = ((start + t) * heads + h) * dim;
                if (sinks) most[i] = sinks[h], total[i] = 1.0f;
                if (++g == group) g = 0, token++;
            }
            for (int64_t d = 0; d < dim; d++)
                for (int64_t i = 0; i < LANES; i++) queries[d * LANES + i] = wide(q[from[i] + d]) * scale;
            std::fill_n(sums, LANES * dim, 0.0f);
            int64_t last = position[lanes - 1] + 1, first = window ? std::max<int64_t>(0, nearest - window + 1) : 0;
            for (int64_t at = first, n; at < last; at += n) {
                n = std::min(KEYS, last - at);
                for (int64_t j = 0; j < n; j += WIDE) {  // maybe beyond n: what comes of that is not read
                    Vector dots[WIDE] = {};
                    for (int64_t d = 0; d < dim; d++) {
                        Vector query = *reinterpret_cast<const Vector*>(queries + d * LANES);
                        #pragma GCC unroll 8
                        for (int p = 0; p < WIDE; p++) dots[p] = fused(query, keys[(at + j + p) * dim + d], dots[p]);
                    }
                    #pragma GCC unroll 8
                    for (int p = 0; p < WIDE; p++) rows[j + p] = dots[p];
                }
                for (int64_t j = std::max<int64_t>(0, window ? 0 : nearest + 1 - at); j < n; j++)
                    rows[j] = (position < int(at + j)) | (position >= int(at + j + reach)) ? least : rows[j];
                Vector top = most;
                for (int64_t j = 0; j < n; j++) top = rows[j] > top ? rows[j] : top;
                Vector shrink = exponentials(most - top);
                total *= shrink;
                for (int64_t j = 0; j < n; j++) total += rows[j] = exponentials(rows[j] - top);
                most = top;
                auto weigh = [&](int64_t d, auto count) {
                    constexpr int COUNT = decltype(count)::value;
                    Vector sum[COUNT];
                    #pragma GCC unroll 8
                    for (int p = 0; p < COUNT; p++) sum[p] = parts[d + p] * shrink;
                    for (int64_t j = 0; j < n; j++)
                        #pragma GCC unroll 8
                        for (int p = 0; p < COUNT; p++) sum[p] = fused(rows[j], values[(at + j) * dim + d + p], sum[p]);
                    #pragma GCC unroll 8
                    for (int p = 0; p < COUNT; p++) parts[d + p] = sum[p];
                };
                int64_t d = 0;
                for (; d + WIDE <= dim; d += WIDE) weigh(d, std::integral_constant<int, WIDE>());
                for (; d < dim; d++) weigh(d, std::integral_constant<int, 1>());
            }
            Vector share = 1.0f / total;
            for (int64_t d = 0; d < dim; d++) parts[d] *= share;
            for (int64_t i = 0; i < lanes; i++)
                for (int64_t d = 0; d < dim; d++) put(out[to[i] + d], sums[d * LANES + i]);
        }
    });
}

// The next token of each of `rows` sequences, all layers: x (rows, width) becomes the last hidden states, before their
// norm. Angles are (rows, dim); row r has lengths[r] tokens cached, in the pages tables[r]. The dimension of a head is a
// multiple of 16.
extern "C" void decode_fp32(float* x, const Layer* layers, const Sizes* sizes, const float* cos, const float* sin,
                            const int64_t* lengths, const int32_t* tables, float eps, int64_t rows, int threads) {
    int64_t width = sizes->width, heads = sizes->heads, kv = sizes->kv, dim = sizes->dim, hidden = sizes->hidden;
    int64_t page = sizes->page, across = sizes->across, ends = (heads + 2 * kv) * dim;
    bool per_head = sizes->per_head;
    static thread_local std::vector<float> memory;
    memory.resize(size_t(rows) * (2 * width + ends + heads * dim + 3 * hidden + 1));
    float *h = memory.data(), *out = h + rows * width, *qkv = out + rows * width, *attended = qkv + rows * ends;
    float *both = attended + rows * heads * dim, *open = both + rows * 2 * hidden, *scales = open + rows * hidden;
    auto add = [&](float* to, const float* from) {
        #pragma omp simd
        for (int64_t i = 0; i < rows * width; i++) to[i] += from[i];
    };
    auto normalize = [&](float* part, const float* weight, int64_t parts, int64_t size) {
        std::vector<float> ignored(parts);
        norm<float>({part, 1, size, 0}, weight, eps, part, ignored.data(), parts, size, 1);
    };
    for (const Layer* layer = layers; layer < layers + sizes->layers; layer++) {
        norm<float>({x, 1, width, 0}, layer->attn_norm, eps, h, scales, rows, width, threads);
        product_fp32(h, layer->qkv, qkv, rows, width, ends, threads);
        for (int64_t row = 0; row < rows; row++) {
            float *q = qkv + row * ends, *k = q + heads * dim, *v = k + kv * dim;
            if (layer->bias)
                for (int64_t i = 0; i < ends; i++) q[i] += layer->bias[i];
            if (layer->q_norm) {
                normalize(q, layer->q_norm, per_head ? heads : 1, per_head ? dim : heads * dim);
                normalize(k, layer->k_norm, per_head ? kv : 1, per_head ? dim : kv * dim);
            }
            const float *c = cos + row * dim, *s = sin + row * dim;
            for (int64_t head = 0; head < heads + kv; head++) {
                float *first = q + head * dim, *second = first + dim / 2;
                #pragma omp simd
                for (int64_t i = 0; i < dim / 2; i++) {
                    float a = first[i], b = second[i];
                    first[i] = a * c[i] + b * s[i];
                    second[i] = b * c[i + dim / 2] + a * s[i + dim / 2];
                }
            }
            int64_t to = place(tables + row * across, page, lengths[row]) * kv * dim;
            std::copy_n(k, kv * dim, layer->keys + to);
            std::copy_n(v, kv * dim, layer->values + to);
        }
        attend<float>(qkv, ends, layer->keys, layer->values, lengths, tables, attended, across, heads, kv, dim, page,
                      layer->window, rows, threads);
        product_fp32(attended, layer->o, out, rows, heads * dim, width, threads);
        add(x, out);
        norm<float>({x, 1, width, 0}, layer->mlp_norm, eps, h, scales, rows, width, threads);
        product_fp32(h, layer->gate_up, both, rows, width, 2 * hidden, threads);
        gate<float>(both, open, rows, hidden, threads);
        product_fp32(open, layer->down, out, rows, hidden, width, threads);
        add(x, out);
    }
}

// One token of each row of scores, from softmax(scores / heat) by the row's own random number, or the likeliest where
// the heat is 0; and its log-probability, at a heat of 1 there.
extern "C" void draw_fp32(const float* scores, int64_t apart, const float* heats, const int64_t* seeds,
                          const int64_t* draws, int64_t* tokens, float* logprobs, int64_t rows, int64_t vocab,
                          int threads) {
    shared_out(rows, vocab, threads, [=](int64_t begin, int64_t end, int) {
        std::vector<float> weights(vocab);
        std::vector<double> sums((vocab + BLOCK - 1) / BLOCK);
        for (int64_t row = begin; row < end; row++) {
            const float* from = scores + row * apart;
            float heat = heats[row] > 0 ? heats[row] : 1.0f, most = from[0] / heat, *w = weights.data();
            int64_t best = 0;
            double total = 0;
            for (int64_t i = 0; i < vocab; i++) {
                w[i] = from[i] / heat;
                best = w[i] > most ? i : best;
                most = w[i] > most ? w[i] : most;
            }
            for (int64_t b = 0; b * BLOCK < vocab; b++) {
                int n = int(std::min(BLOCK, vocab - b * BLOCK));
                float sum = 0, *part = w + b * BLOCK;
                #pragma omp simd
                for (int i = 0; i < n; i++) {
                    float below = part[i] - most;
                    part[i] = below < -87.0f ? 0.0f : exponential(below);
                }
                #pragma omp simd reduction(+ : sum)
                for (int i = 0; i < n; i++) sum += part[i];
                sums[b] = sum;
                total += sum;
            }
            int64_t chosen = best;
            if (heats[row] > 0) {
                double left = double(mixed(mixed(uint64_t(seeds[row])) ^ uint64_t(draws[row])) >> 11) * 0x1p-53 * total;
                int64_t b = 0, blocks = int64_t(sums.size());
                for (; b + 1 < blocks && sums[b] <= left; b++) left -= sums[b];
                // Where rounding leaves nothing beyond the goal it is the last one that can be drawn.
                for (int64_t i = b * BLOCK; i < vocab; i++) {
                    if (w[i] > 0) chosen = i;
                    left -= w[i];
                    if (w[i] > 0 && left < 0) break;
                }
            }
            tokens[row] = chosen;
            logprobs[row] = from[chosen] / heat - (most + float(std::log(total)));
        }
    });
}

#define KERNELS(T, NAME)                                                                                              \
    extern "C" void norm_##NAME(T* x, int64_t inner, int64_t by_outer, int64_t by_inner, float* weight, float eps,    \
                                T* out, float* scales, int64_t rows, int64_t width, int threads) {                    \
        norm<T>({x, inner, by_outer, by_inner}, weight, eps, out, scales, rows, width, threads);                      \
    }                                                                                                                 \
    extern "C" void norm_backward_##NAME(T* grads, T* x, int64_t inner, int64_t by_outer, int64_t by_inner,           \
                                         float* weight, float* scales, T* to_x, float* to_weight, int64_t rows,       \
                                         int64_t width, int threads) {                                                \
        norm_backward<T>(grads, {x, inner, by_outer, by_inner}, weight, scales, to_x, to_weight, rows, width,         \
                         threads);                                                                                    \
    }                                                                                                                 \
    extern "C" void turn_##NAME(T* x, int64_t inner, int64_t by_outer, int64_t by_inner, float* cos, float* sin,      \
                                float sign, T* out, int64_t rows, int64_t width, int threads) {                       \
        turn<T>({x, inner, by_outer, by_inner}, cos, sin, sign, out, rows, width, threads);                           \
    }                                                                                                                 \
    extern "C" void gate_##NAME(T* both, T* out, int64_t rows, int64_t width, int threads) {                          \
        gate<T>(both, out, rows, width, threads);                                                                     \
    }                                                                                                                 \
    extern "C" void gate_backward_##NAME(T* grads, T* both, T* to_both, int64_t rows, int64_t width, int threads) {   \
        gate_backward<T>(grads, both, to_both, rows, width, threads);                                                 \
    }                                                                                                                 \
    extern "C" void attend_##NAME(T* q, T* keys, T* values, int64_t* lengths, int32_t* tables, T* out,                \
                                  int64_t across, int64_t heads, int64_t kv, int64_t dim, int64_t page,               \
                                  int64_t window, int64_t rows, int threads) {                                        \
        attend<T>(q, heads * dim, keys, values, lengths, tables, out, across, heads, kv, dim, page, window, rows,     \
                  threads);                                                                                           \
    }                                                                                                                 \
    extern "C" void tree_##NAME(T* q, T* k, T* v, float* sinks, int64_t* ranges, int64_t* bounds, T* out,             \
                                int64_t q_apart, int64_t k_apart, int64_t v_apart, int64_t heads, int64_t kv,         \
                                int64_t dim, int64_t window, int64_t sequences, int threads) {                        \
        tree<T>(q, k, v, sinks, ranges, bounds, out, q_apart, k_apart, v_apart, heads, kv, dim, window, sequences,    \
                threads);                                                                                             \
    }

KERNELS(float, fp32)
KERNELS(bf16, bf16)
