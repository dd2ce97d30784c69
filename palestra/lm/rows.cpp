// Passes over rows on the CPU, each in one go where torch's operations would take five to ten. `native.py` calls them.
//
// Rows are FP32 or bfloat16; arithmetic is FP32 and rounded once, to the nearest. What becomes of a row depends on
// that row alone.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <cmath>
#include <system_error>
#include <thread>
#include <vector>

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

// Calls work(begin, end, share) for shares of the rows, one a thread where there is enough to do.
template <class Work> static void shared_out(int64_t rows, int64_t width, int threads, Work work) {
    int64_t worth = rows * width >> 16;
    int shares = int(worth < threads ? (worth < 1 ? 1 : worth) : threads);
    std::vector<std::thread> others;
    for (int share = 1; share < shares; share++) {
        auto mine = [=] { work(rows * share / shares, rows * (share + 1) / shares, share); };
        try {
            others.emplace_back(mine);
        } catch (const std::system_error&) {  // the machine gives no more threads
            mine();
        }
    }
    work(0, rows / shares, 0);
    for (auto& other : others) other.join();
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
        int64_t half = width / 2;
        for (int64_t row = begin; row < end; row++) {
            const T* from = x[row];
            T* to = out + row * width;
            const float *c = cos + row / x.inner * width, *s = sin + row / x.inner * width;
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

// Puts the key or value of each row's new token behind those that its heads have in a cache (rows, heads, context, dim).
template <class T> static void keep(Rows<T> fresh, T* cache, const int64_t* lengths, int64_t rows, int64_t heads,
                                    int64_t context, int64_t dim) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++)
            std::copy_n(fresh[row * heads + head], dim, cache + ((row * heads + head) * context + lengths[row]) * dim);
}

static inline uint64_t mixed(uint64_t x) {  // SplitMix64
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
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
    extern "C" void keep_##NAME(T* fresh, int64_t inner, int64_t by_outer, int64_t by_inner, T* cache,                \
                                int64_t* lengths, int64_t rows, int64_t heads, int64_t context, int64_t dim, int) {   \
        keep<T>({fresh, inner, by_outer, by_inner}, cache, lengths, rows, heads, context, dim);                       \
    }                                                                                                                 \
    extern "C" void gate_##NAME(T* both, T* out, int64_t rows, int64_t width, int threads) {                          \
        gate<T>(both, out, rows, width, threads);                                                                     \
    }                                                                                                                 \
    extern "C" void gate_backward_##NAME(T* grads, T* both, T* to_both, int64_t rows, int64_t width, int threads) {   \
        gate_backward<T>(grads, both, to_both, rows, width, threads);                                                 \
    }

KERNELS(float, fp32)
KERNELS(bf16, bf16)
