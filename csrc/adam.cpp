/* The optimizer's arithmetic over host memory: Adam and AdamW, the split master, gradient accumulation.
 *
 * Stateless: pointers, sizes and scalars in, nothing kept. Each formula is written once, for one element, at the
 * top; below it plain loops apply it, which the compiler vectorises once per instruction set. No intrinsics: with
 * all threads at work memory, not arithmetic, is the limit.
 *
 * [Note: Equal bits]  The result depends on the inputs only, never on the instruction set, the thread count or
 * how a caller cuts a range into calls: every element is computed alone, in IEEE fp32, in the order written here.
 * So nothing may be contracted to a fused multiply-add (the build passes -ffp-contract=off), and every thread runs
 * with the default floating-point environment whatever its caller has set (see DefaultArithmetic). The one
 * exception is which NaN comes out where two different NaNs meet.
 */
#include "tiered.h"

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstring>

#if defined(__FAST_MATH__)
#error "adam.cpp promises equal bits everywhere: build it without -ffast-math"
#endif
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

/* One copy of a loop per x86-64 level, chosen when the library is loaded. It needs ifunc (glibc) and a compiler
 * that knows the levels in target_clones; everyone else gets one plain copy, as does TIERED_ONE_COPY (tests). */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(TIERED_ONE_COPY) && \
    ((defined(__clang__) && __clang_major__ >= 18) || (!defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 12))
#define TIERED_CLONED 1
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE inline __attribute__((always_inline))

namespace {

/* ---- one element: the reference -------------------------------------------------------------- */

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

/* The scalars of one update: computed in double, rounded once, as torch does. */
struct Scalars {
    float grad_scale;  // negative to ascend
    float decay;       // 1 - lr * weight_decay, or 1
    float l2;          // weight_decay added to the gradient, or 0
    float weight1;     // 1 - beta1
    float keep1;       // 1 - weight1
    float beta2;
    float weight2;     // 1 - beta2
    float bias2_sqrt;
    float eps;
    float step_size;   // -lr / bias_correction1

    explicit Scalars(const tiered_adam &a)
        : grad_scale(static_cast<float>(a.maximize ? -a.grad_scale : a.grad_scale)),
          decay(static_cast<float>(a.decoupled ? 1.0 - a.lr * a.weight_decay : 1.0)),
          l2(static_cast<float>(a.decoupled ? 0.0 : a.weight_decay)),
          weight1(static_cast<float>(1.0 - a.beta1)),
          keep1(1.0f - weight1),
          beta2(static_cast<float>(a.beta2)),
          weight2(static_cast<float>(1.0 - a.beta2)),
          bias2_sqrt(static_cast<float>(a.bias_correction2_sqrt)),
          eps(static_cast<float>(a.eps)),
          step_size(static_cast<float>(-(a.lr / a.bias_correction1))) {}
};

/* The operations of torch's single-tensor Adam in their order: add(alpha), mul, lerp, mul.addcmul, sqrt/div/add,
 * addcdiv. */
inline void adam_element(float &p, float g, float &m, float &v, const Scalars &s) {
    g = g * s.grad_scale;
    g = s.l2 != 0.0f ? g + p * s.l2 : g;
    p = p * s.decay;
    m = s.weight1 < 0.5f ? m + s.weight1 * (g - m) : g - (g - m) * s.keep1;
    v = v * s.beta2 + (s.weight2 * g) * g;
    p = p + (s.step_size * m) / (std::sqrt(v) / s.bias2_sqrt + s.eps);
}

/* How numbers are stored, and their fp32 value. */
struct Bf16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};

inline float value_of(float x) { return x; }

inline float value_of(Bf16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

/* Exact, and without touching an fp32 subnormal, which many processors handle slowly. */
inline float value_of(F16 x) {
    const uint32_t body = (x.bits & 0x7fffu) << 13;  // exponent and mantissa at their fp32 places, bias still 15
    const uint32_t normal = body + (112u << 23);
    const uint32_t subnormal = bits_of(float_of(body + (113u << 23)) - 0x1p-14f);
    const uint32_t special = body | 0x7f800000u;
    const uint32_t magnitude = body < (1u << 23) ? subnormal : body < (31u << 23) ? normal : special;
    return float_of(magnitude | (x.bits & 0x8000u) << 16);
}

inline bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

/* To nearest even. Every NaN becomes the plain one. */
inline Bf16 to_bf16(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return {static_cast<uint16_t>(is_nan(bits) ? 0x7fc0u : rounded)};
}

/* [Note: Split master]  An fp32 master M is kept as hi, the bf16 weight that computes, and lo, its low 16 bits.
 * hi = (M >> 16) + (lo >> 15) mod 2^16 rounds half away from zero (to infinity from 0x7f7f8000 on, as any
 * rounding to bf16 does), and lo says whether it was rounded up: M comes back from all 2^32 patterns.
 * Exactness leaves too few bf16 NaNs for all fp32 NaNs: hi of 0x7f800001..0x7f807fff is infinity and hi of
 * 0x7fff8000..0x7fffffff is a zero of the other sign (likewise with the sign bit set). tiered_split_f32 keeps the
 * bits even then; no arithmetic makes such a NaN out of numbers, and an update stores every NaN as the plain one,
 * so a NaN can hide in hi until the next update at most. */
inline uint16_t hi_of(uint32_t master) { return static_cast<uint16_t>((master >> 16) + ((master >> 15) & 1u)); }

inline uint16_t lo_of(uint32_t master) { return static_cast<uint16_t>(master); }

inline uint32_t master_of(uint16_t hi, uint16_t lo) {
    return ((static_cast<uint32_t>(hi) - (lo >> 15)) << 16) | lo;
}

/* ---- loops over one block -------------------------------------------------------------------- */

template <typename Grad>
INLINE void adam_f32_loop(int64_t n, float *__restrict p, const Grad *__restrict g, float *__restrict m,
                          float *__restrict v, const Scalars s) {
    for (int64_t i = 0; i < n; ++i) adam_element(p[i], value_of(g[i]), m[i], v[i], s);
}

template <typename Grad>
INLINE void adam_split_loop(int64_t n, uint16_t *__restrict hi, uint16_t *__restrict lo, const Grad *__restrict g,
                            float *__restrict m, float *__restrict v, const Scalars s) {
    for (int64_t i = 0; i < n; ++i) {
        float p = float_of(master_of(hi[i], lo[i]));
        adam_element(p, value_of(g[i]), m[i], v[i], s);
        const uint32_t master = is_nan(bits_of(p)) ? 0x7fc00000u : bits_of(p);
        hi[i] = hi_of(master);
        lo[i] = lo_of(master);
    }
}

template <typename Grad>
INLINE void adam_bf16_loop(int64_t n, Bf16 *__restrict param, const Grad *__restrict g, float *__restrict m,
                           float *__restrict v, const Scalars s) {
    for (int64_t i = 0; i < n; ++i) {
        float p = value_of(param[i]);
        adam_element(p, value_of(g[i]), m[i], v[i], s);
        param[i] = to_bf16(p);
    }
}

template <typename Addend>
INLINE void accumulate_loop(int64_t n, float *__restrict a, const Addend *__restrict b) {
    for (int64_t i = 0; i < n; ++i) a[i] = a[i] + value_of(b[i]);
}

/* clang clones no templates, so each type of gradient gets functions of its own. */
#define CLONED_LOOPS(Grad)                                                                                       \
    CLONES void adam_f32(int64_t n, float *p, const Grad *g, float *m, float *v, const Scalars &s) {             \
        adam_f32_loop(n, p, g, m, v, s);                                                                         \
    }                                                                                                            \
    CLONES void adam_split(int64_t n, uint16_t *hi, uint16_t *lo, const Grad *g, float *m, float *v,             \
                           const Scalars &s) {                                                                   \
        adam_split_loop(n, hi, lo, g, m, v, s);                                                                  \
    }                                                                                                            \
    CLONES void adam_bf16(int64_t n, Bf16 *p, const Grad *g, float *m, float *v, const Scalars &s) {             \
        adam_bf16_loop(n, p, g, m, v, s);                                                                        \
    }                                                                                                            \
    CLONES void accumulate(int64_t n, float *a, const Grad *b) { accumulate_loop(n, a, b); }

CLONED_LOOPS(float)
CLONED_LOOPS(Bf16)
CLONED_LOOPS(F16)

CLONES void split(int64_t n, const float *__restrict source, uint16_t *__restrict hi, uint16_t *__restrict lo) {
    for (int64_t i = 0; i < n; ++i) {
        hi[i] = hi_of(bits_of(source[i]));
        lo[i] = lo_of(bits_of(source[i]));
    }
}

CLONES void join(int64_t n, const uint16_t *__restrict hi, const uint16_t *__restrict lo, float *__restrict target) {
    for (int64_t i = 0; i < n; ++i) target[i] = float_of(master_of(hi[i], lo[i]));
}

CLONES void traffic(int64_t n, float *__restrict a, const float *__restrict b, float *__restrict c,
                    float *__restrict d) {
    for (int64_t i = 0; i < n; ++i) {
        a[i] = a[i] + b[i];
        c[i] = c[i] + b[i];
        d[i] = d[i] + b[i];
    }
}

/* ---- blocks and threads ---------------------------------------------------------------------- */

constexpr int64_t block_numel = 1 << 12;       // the grain of sharing out
constexpr int64_t thread_numel_min = 1 << 14;  // less work than this is not worth waking a thread for

/* Round to nearest, subnormals kept, on this thread while in scope; torch.set_flush_denormal changes the
 * caller's thread only. */
class DefaultArithmetic {
public:
    DefaultArithmetic() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultArithmetic() { std::fesetenv(&saved_); }
    DefaultArithmetic(const DefaultArithmetic &) = delete;
    DefaultArithmetic &operator=(const DefaultArithmetic &) = delete;

private:
    std::fenv_t saved_;
};

Scalars scalars_of(const tiered_adam &a) {
    const DefaultArithmetic scope;
    return Scalars(a);
}

/* Calls body(first, count) for every block of 0..n, each on some thread. */
template <typename Body>
void for_blocks(int64_t n, int32_t threads, const Body &body) {
    const int64_t blocks = (n + block_numel - 1) / block_numel;
    const int team = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, n / thread_numel_min)));
    (void)team;
#ifdef _OPENMP
#pragma omp parallel num_threads(team)
#endif
    {
        const DefaultArithmetic scope;
#ifdef _OPENMP
#pragma omp for schedule(static)
#endif
        for (int64_t b = 0; b < blocks; ++b) body(b * block_numel, std::min(block_numel, n - b * block_numel));
    }
}

/* Calls body with the gradient or addend as what it is. */
template <typename Body>
void as_stored(const void *numbers, int32_t type, const Body &body) {
    switch (type) {
    case TIERED_F32: body(static_cast<const float *>(numbers)); break;
    case TIERED_BF16: body(static_cast<const Bf16 *>(numbers)); break;
    case TIERED_F16: body(static_cast<const F16 *>(numbers)); break;
    }
}

const char *isa() {
#if defined(TIERED_CLONED)  // asks what the loops' resolvers ask
    if (__builtin_cpu_supports("x86-64-v4")) return "x86-64-v4";
    if (__builtin_cpu_supports("x86-64-v3")) return "x86-64-v3";
#elif defined(__ARM_NEON)
    return "neon";
#endif
    return "generic";
}

}  // namespace

/* ---- the C ABI ------------------------------------------------------------------------------- */

void tiered_adam_f32(int64_t n, float *param, const void *grad, int32_t grad_type, float *exp_avg, float *exp_avg_sq,
                     const tiered_adam *a, int32_t threads) {
    const Scalars s = scalars_of(*a);
    as_stored(grad, grad_type, [=](auto g) {
        for_blocks(n, threads, [=](int64_t i, int64_t count) {
            adam_f32(count, param + i, g + i, exp_avg + i, exp_avg_sq + i, s);
        });
    });
}

void tiered_adam_split(int64_t n, uint16_t *hi, uint16_t *lo, const void *grad, int32_t grad_type, float *exp_avg,
                       float *exp_avg_sq, const tiered_adam *a, int32_t threads) {
    const Scalars s = scalars_of(*a);
    as_stored(grad, grad_type, [=](auto g) {
        for_blocks(n, threads, [=](int64_t i, int64_t count) {
            adam_split(count, hi + i, lo + i, g + i, exp_avg + i, exp_avg_sq + i, s);
        });
    });
}

void tiered_adam_bf16(int64_t n, uint16_t *param, const void *grad, int32_t grad_type, float *exp_avg,
                      float *exp_avg_sq, const tiered_adam *a, int32_t threads) {
    const Scalars s = scalars_of(*a);
    Bf16 *const p = reinterpret_cast<Bf16 *>(param);
    as_stored(grad, grad_type, [=](auto g) {
        for_blocks(n, threads, [=](int64_t i, int64_t count) {
            adam_bf16(count, p + i, g + i, exp_avg + i, exp_avg_sq + i, s);
        });
    });
}

void tiered_split_f32(int64_t n, const float *source, uint16_t *hi, uint16_t *lo, int32_t threads) {
    for_blocks(n, threads, [=](int64_t i, int64_t count) { split(count, source + i, hi + i, lo + i); });
}

void tiered_join_f32(int64_t n, const uint16_t *hi, const uint16_t *lo, float *target, int32_t threads) {
    for_blocks(n, threads, [=](int64_t i, int64_t count) { join(count, hi + i, lo + i, target + i); });
}

void tiered_accumulate_f32(int64_t n, float *accumulator, const void *addend, int32_t addend_type, int32_t threads) {
    as_stored(addend, addend_type, [=](auto b) {
        for_blocks(n, threads, [=](int64_t i, int64_t count) { accumulate(count, accumulator + i, b + i); });
    });
}

void tiered_traffic_f32(int64_t n, float *a, const float *b, float *c, float *d, int32_t threads) {
    for_blocks(n, threads, [=](int64_t i, int64_t count) { traffic(count, a + i, b + i, c + i, d + i); });
}

const char *tiered_kernel_isa(void) { return isa(); }
