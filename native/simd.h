// Vectors as wide as the instruction set that this file is compiled for. All kernels are written in terms of them.
//
// Floats and Ints are the compiler's vector types, with the usual operators. The functions below do what operators
// can't.
#pragma once

#include <cstdint>
#include <cstring>

#include "half.h"

#if defined(__AVX512VNNI__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace infinilm::INFINILM_ISA {

#if defined(__AVX512VNNI__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(4 * kLanes)));

// Vectors of numbers in memory need not be aligned.
inline Floats load(const float* from) {
    Floats to;
    std::memcpy(&to, from, sizeof to);
    return to;
}

inline void store(float* to, Floats from) { std::memcpy(to, &from, sizeof from); }

inline Bytes load(const uint8_t* from) {
    Bytes to;
    std::memcpy(&to, from, sizeof to);
    return to;
}

inline Floats all(float value) { return value - Floats{}; }  // plus would cost an addition: -0 + 0 is not -0
inline Ints all(int32_t value) { return value - Ints{}; }
inline Floats to_floats(Ints values) { return __builtin_convertvector(values, Floats); }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Ints larger(Ints a, Ints b) { return a > b ? a : b; }
inline Floats absolute(Floats a) { return (Floats)((Ints)a & 0x7fffffff); }

// Up to a vector of numbers, padded with zeros.
inline Floats load_some(const float* from, int count) {
    if (count >= kLanes) return load(from);
    Floats to = all(0.0f);
    for (int i = 0; i < count; ++i) to[i] = from[i];
    return to;
}

inline void store_some(float* to, Floats from, int count) {
    if (count >= kLanes) return store(to, from);
    for (int i = 0; i < count; ++i) to[i] = from[i];
}

// a * b + c, rounded once if there is an instruction for it. The compiler must not choose, because it might choose
// differently for one row and for eight.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512VNNI__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

inline float multiply_add(float a, float b, float c) {
#if defined(__AVX512VNNI__) || defined(__AVX2__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// Rounds to the nearest integer, ties to even: above 2^23 a float has no bits for a fraction.
inline Floats round_to_even(Floats a) {
    const Floats shift = all(12582912.0f);  // 1.5 * 2^23
    return (a + shift) - shift;
}

// Whole numbers from -128 to 127, as bytes.
inline void store_bytes(int8_t* to, Floats whole) {
    typedef int8_t Small __attribute__((vector_size(kLanes)));
    const Small bytes = __builtin_convertvector(__builtin_convertvector(whole, Ints), Small);
    std::memcpy(to, &bytes, sizeof bytes);
}

// Whole numbers from -32768 to 32767, as int16.
inline void store_shorts(int16_t* to, Floats whole) {
    typedef int16_t Small __attribute__((vector_size(2 * kLanes)));
    const Small shorts = __builtin_convertvector(__builtin_convertvector(whole, Ints), Small);
    std::memcpy(to, &shorts, sizeof shorts);
}

// ---- float16 and bfloat16 ----

inline Floats load_half(const uint16_t* from) {
#if defined(__AVX512VNNI__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    Floats to;
    for (int i = 0; i < kLanes; ++i) to[i] = half_to_float(from[i]);
    return to;
#endif
}

inline void store_half(uint16_t* to, Floats from) {
#if defined(__AVX512VNNI__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)from, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
    _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)from, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < kLanes; ++i) to[i] = float_to_half(from[i]);
#endif
}

inline Floats load_bfloat16(const uint16_t* from) {
    typedef uint16_t Shorts __attribute__((vector_size(2 * kLanes)));
    Shorts shorts;
    std::memcpy(&shorts, from, sizeof shorts);
    return (Floats)(__builtin_convertvector(shorts, Ints) << 16);
}

inline void store_bfloat16(uint16_t* to, Floats from) {
    for (int i = 0; i < kLanes; ++i) to[i] = float_to_bfloat16(from[i]);
}

// 8-bit floats (e4m3) without NaN. Their bits are those of float16 numbers that are 1/256 as large.
inline Floats load_float8(const uint8_t* from) {
#if defined(__AVX512VNNI__)
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(int16_t(0xbf80)));
    return (Floats)_mm512_maskz_cvtph_ps(0xffff, halves) * 0x1p8f;  // without a mask GCC 12 warns
#elif defined(__AVX2__)
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)from));
    const __m128i halves = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(int16_t(0xbf80)));
    return (Floats)_mm256_cvtph_ps(halves) * 0x1p8f;
#else
    typedef uint8_t Small __attribute__((vector_size(kLanes)));
    Small bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    const Ints whole = __builtin_convertvector(bytes, Ints), rest = whole & 0x7f;
    const Ints normal = (rest << 20) + (120 << 23);
    const Ints small = (Ints)(to_floats(rest) * 0x1p-9f);
    return (Floats)((rest < 8 ? small : normal) | (whole & 0x80) << 24);
#endif
}

// ---- products of bytes ----

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
constexpr bool kHasShortSums = true;
#else
constexpr bool kHasShortSums = false;
#endif

// How often `add_products` may be called before `widen` has to convert the sums to int32, for weights of kBits bits.
// Without an instruction that adds in 32 bits, sums are int16 in between.
template <int kBits>
constexpr int kQuadsPerSum = !kHasShortSums ? 8 : kBits == 4 ? 8 : kBits == 5 ? 4 : kBits == 6 ? 2 : 1;

// sum[lane] += w[4 lane + i] * x[i] for i = 0 ... 3, with x from -127 to 127. With short sums, a lane's sum is two
// int16, and w of 8 bits is taken as w - 128, so that no sum of two products overflows.
template <int kBits>
inline Ints add_products(Ints sum, Bytes w, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)all(four));
#elif defined(__AVXVNNI__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)all(four));
#elif defined(__AVX2__)
    __m256i a = (__m256i)w, b = (__m256i)all(four);
    if constexpr (kBits == 8) {
        const __m256i centred = _mm256_xor_si256(a, _mm256_set1_epi8(-128));
        a = _mm256_abs_epi8(centred);
        b = _mm256_sign_epi8(b, centred);
    }
    return (Ints)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16(a, b));
#else
    for (int lane = 0; lane < kLanes; ++lane) {
        for (int i = 0; i < 4; ++i) sum[lane] += int(w[4 * lane + i]) * int(x[i]);
    }
    return sum;
#endif
}

// The sums of four numbers each.
inline Ints add_quads(const int8_t* x) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), _mm512_loadu_si512(x));
#elif defined(__AVX2__)
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), _mm256_loadu_si256((const __m256i*)x));
    return (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    Ints sums{};
    for (int i = 0; i < 4 * kLanes; ++i) sums[i / 4] += x[i];
    return sums;
#endif
}

inline Ints widen(Ints sum) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
    return (Ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
#else
    return sum;
#endif
}

// The pair of int16 x[0] and x[1] in every lane.
inline Ints all_pairs(const int16_t* x) {
    int32_t two;
    std::memcpy(&two, x, sizeof two);
    return all(two);
}

// The first two bytes of each lane as int16; `upper_pairs` takes the last two.
inline Ints lower_pairs(Bytes fours) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_shuffle_epi8((__m512i)fours, _mm512_set4_epi32(0x800d800c, 0x80098008, 0x80058004, 0x80018000));
#elif defined(__AVX2__)
    return (Ints)_mm256_shuffle_epi8((__m256i)fours, _mm256_setr_epi32(
        0x80018000, 0x80058004, 0x80098008, 0x800d800c, 0x80018000, 0x80058004, 0x80098008, 0x800d800c));
#else
    return ((Ints)fours & 0xff) | (((Ints)fours & 0xff00) << 8);
#endif
}

inline Ints upper_pairs(Bytes fours) { return lower_pairs((Bytes)((Ints)fours >> 16)); }

inline Ints subtract_shorts(Ints pairs, int zero) {
    typedef int16_t Shorts __attribute__((vector_size(4 * kLanes)));
    return (Ints)((Shorts)pairs - int16_t(zero));
}

// sum[lane] += the products of the lanes' pairs.
inline Ints add_pairs(Ints sum, Ints w, Ints x) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__)
    return (Ints)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#elif defined(__AVX2__)
    return sum + (Ints)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#else
    return sum + (w << 16 >> 16) * (x << 16 >> 16) + (w >> 16) * (x >> 16);
#endif
}

// ---- over a vector ----

// Whether any lane of a is larger than that of b.
inline bool is_any_larger(Floats a, Floats b) {
#if defined(__AVX512VNNI__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ)) != 0;
#else
    for (int i = 0; i < kLanes; ++i) {
        if (a[i] > b[i]) return true;
    }
    return false;
#endif
}

// Lanes picked from a (0 to kLanes - 1) and b (from kLanes on).
inline Floats pick(Floats a, Floats b, Ints lanes) {
#if defined(__clang__)
    Floats picked;
    for (int i = 0; i < kLanes; ++i) picked[i] = lanes[i] < kLanes ? a[lanes[i]] : b[lanes[i] - kLanes];
    return picked;
#else
    return __builtin_shuffle(a, b, lanes);
#endif
}

// One step of combining vectors: neighbouring pieces of `kWidth` lanes are combined; a's results are next to b's.
template <int kWidth, typename Combine>
inline Floats combine_neighbours(Floats a, Floats b, const Combine& combine) {
    Ints first{};
    for (int i = 0; i < kLanes; ++i) {
        const bool is_b = i / kWidth % 2;
        first[i] = i / (2 * kWidth) * 2 * kWidth + i % kWidth + (is_b ? kLanes : 0);
    }
    return combine(pick(a, b, first), pick(a, b, first + kWidth));
}

// Combine the lanes of some vectors, whose number is a power of 2: neighbouring lanes first, then neighbouring pieces
// of 2, and so on up to pieces of kLast lanes. If all lanes are combined, lane i has the result of vector i; results
// are repeated if there are fewer vectors than lanes. With kLast = 2 and four vectors, lane 4 k + i has the result of
// the lanes 4 k to 4 k + 3 of vector i. The vectors are overwritten.
template <int kLast, int kWidth = 1, int kCount, typename Combine>
inline Floats combine_each(Floats (&vectors)[kCount], const Combine& combine, int count = kCount) {
    if constexpr (kWidth > kLast) {
        return vectors[0];
    } else {
        const int half = count > 1 ? count / 2 : 1;
#pragma GCC unroll 16
        for (int i = 0; i < half; ++i) {
            const Floats other = count > 1 ? vectors[2 * i + 1] : vectors[0];
            vectors[i] = combine_neighbours<kWidth>(vectors[2 * i], other, combine);
        }
        return combine_each<kLast, 2 * kWidth>(vectors, combine, half);
    }
}

// The sums of kLanes vectors, one per lane.
inline Floats sums_of(Floats (&vectors)[kLanes]) {
    return combine_each<kLanes / 2>(vectors, [](Floats a, Floats b) { return a + b; });
}

// Transpose in place: two rows that are `kWidth` apart exchange pieces of `kWidth` lanes, then pieces twice as wide.
template <int kWidth = 1>
inline void transpose(Floats (&rows)[kLanes]) {
    Ints first{}, second{};
    for (int i = 0; i < kLanes; ++i) {
        const bool is_odd = i / kWidth % 2;
        first[i] = is_odd ? kLanes + i - kWidth : i;
        second[i] = is_odd ? kLanes + i : i + kWidth;
    }
#pragma GCC unroll 16
    for (int pair = 0; pair < kLanes / 2; ++pair) {
        const int i = pair / kWidth * 2 * kWidth + pair % kWidth;
        const Floats a = rows[i], b = rows[i + kWidth];
        rows[i] = pick(a, b, first);
        rows[i + kWidth] = pick(a, b, second);
    }
    if constexpr (2 * kWidth < kLanes) transpose<2 * kWidth>(rows);
}

// Combine all lanes of a vector: halves first, then quarters, and so on.
template <int kWidth = kLanes / 2, typename Combine>
inline float reduce(Floats values, const Combine& combine) {
    if constexpr (kWidth == 0) {
        return values[0];
    } else {
        Ints lanes{};
        for (int i = 0; i < kLanes; ++i) lanes[i] = (i + kWidth) % kLanes;
        return reduce<kWidth / 2>(combine(values, pick(values, values, lanes)), combine);
    }
}

inline float sum_of(Floats values) {
    return reduce(values, [](Floats a, Floats b) { return a + b; });
}

inline float largest_of(Floats values) {
    return reduce(values, [](Floats a, Floats b) { return larger(a, b); });
}

inline int32_t largest_of(Ints values) {
    const float bits = reduce((Floats)values, [](Floats a, Floats b) { return (Floats)larger((Ints)a, (Ints)b); });
    return int32_t(bits_of(bits));
}

// ---- functions ----

// e^x with a relative error below 2e-7; 0 for x below -87, where the result would leave the normal range.
inline Floats exponential(Floats x) {
    const Floats clamped = x < -87.0f ? all(-87.0f) : x > 88.0f ? all(88.0f) : x;
    const Floats whole = round_to_even(clamped * 1.44269504f);
    Floats rest = multiply_add(whole, all(-0.693359375f), clamped);
    rest = multiply_add(whole, all(2.12194440e-4f), rest);
    Floats y = all(1.9875691500e-4f);
    y = multiply_add(y, rest, all(1.3981999507e-3f));
    y = multiply_add(y, rest, all(8.3334519073e-3f));
    y = multiply_add(y, rest, all(4.1665795894e-2f));
    y = multiply_add(y, rest, all(1.6666665459e-1f));
    y = multiply_add(y, rest, all(5.0000001201e-1f));
    y = multiply_add(y, rest * rest, rest + 1.0f);
    const Ints power = (__builtin_convertvector(whole, Ints) + 127) << 23;
    const Floats result = y * (Floats)power;
    return x < -87.0f ? all(0.0f) : result;
}

}  // namespace infinilm::INFINILM_ISA
