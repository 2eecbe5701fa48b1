// Vectors of sixteen lanes and their operations, for the instruction set of one unit.
//
// Each unit (unit_*.cpp) defines one QUIRE_UNIT_* macro and includes this inside an anonymous
// namespace. In every unit a vector has sixteen lanes, every operation rounds as IEEE 754 says,
// and sums across lanes follow one tree: all units give the same bits.

constexpr float below_half = 0x1.fffffep-2f;  // the largest float below 0.5

#if defined(QUIRE_UNIT_AVX512)

constexpr const char* unit_name = "avx512-vnni";

struct Floats {
  __m512 v;
};
struct Ints {
  __m512i v;
};

INLINE Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE void store(float* p, Floats x) { _mm512_storeu_ps(p, x.v); }
// Past the caches, to whole cache lines; ordered by stream_fence alone.
INLINE void stream(float* p, Floats x) { _mm512_stream_ps(p, x.v); }
INLINE Floats broadcast(float x) { return {_mm512_set1_ps(x)}; }
INLINE Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
INLINE Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Of two equal or unordered numbers the second, in every unit.
INLINE Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
INLINE Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
INLINE Floats absolute(Floats a) { return {_mm512_abs_ps(a.v)}; }
INLINE Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
INLINE Ints to_ints(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }  // nearest, ties to even
// The nearest, ties away from zero: truncated after the largest float below a half was added.
INLINE Ints to_ints_half_away(Floats a) {
  const __m512 sign = _mm512_and_ps(a.v, _mm512_set1_ps(-0.0f));
  const __m512 half = _mm512_or_ps(sign, _mm512_set1_ps(below_half));
  return {_mm512_cvttps_epi32(_mm512_add_ps(a.v, half))};
}
INLINE Ints load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
INLINE void store(int32_t* p, Ints x) { _mm512_storeu_si512(p, x.v); }
INLINE Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
INLINE Ints operator-(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
INLINE Ints operator*(Ints a, Ints b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
// Two signed 16-bit numbers per lane, and their dot product with another pair added to a sum.
INLINE Ints paired(Ints low, Ints high) {
  return {_mm512_mask_blend_epi16(0xAAAAAAAA, low.v, _mm512_slli_epi32(high.v, 16))};
}
INLINE Ints add_pairs(Ints sum, Ints pairs, int32_t pair) {
  return {_mm512_dpwssd_epi32(sum.v, pairs.v, _mm512_set1_epi32(pair))};
}
INLINE Ints broadcast_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
INLINE Ints shift_left_23(Ints a) { return {_mm512_slli_epi32(a.v, 23)}; }
INLINE Ints shift_right(Ints a, int bits) {
  return {_mm512_srai_epi32(a.v, static_cast<unsigned>(bits))};
}
INLINE Floats bits_as_floats(Ints a) { return {_mm512_castsi512_ps(a.v)}; }
INLINE Ints bits_as_ints(Floats a) { return {_mm512_castps_si512(a.v)}; }
INLINE Ints max(Ints a, Ints b) { return {_mm512_max_epi32(a.v, b.v)}; }
INLINE Floats load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// E4M3 floats over 256: see half_of_e4m3. Of a byte's sign bits the shift leaves two.
INLINE Floats load_e4m3(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
  return {_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), mask))};
}
INLINE void store_half(uint16_t* p, Floats x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, 0));
}
INLINE Floats load_bfloat(const uint16_t* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
INLINE Ints load_unsigned_bytes(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
INLINE Ints load_signed_bytes(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
INLINE __m128i bytes_of(Ints x) { return _mm512_cvtepi32_epi8(x.v); }
// Lane i of a where i < count, of b elsewhere.
INLINE Floats first_lanes(Floats a, Floats b, int count) {
  return {_mm512_mask_blend_ps(static_cast<__mmask16>((1u << count) - 1u), b.v, a.v)};
}

#elif defined(QUIRE_UNIT_AVX2)

constexpr const char* unit_name = "avx2";

struct Floats {
  __m256 lo, hi;
};
struct Ints {
  __m256i lo, hi;
};

INLINE Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
INLINE void stream(float* p, Floats x) {
  _mm256_stream_ps(p, x.lo);
  _mm256_stream_ps(p + 8, x.hi);
}
INLINE Floats broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE Floats operator+(Floats a, Floats b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
INLINE Floats operator-(Floats a, Floats b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
INLINE Floats operator*(Floats a, Floats b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
INLINE Floats operator/(Floats a, Floats b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
INLINE Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
INLINE Floats max(Floats a, Floats b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
INLINE Floats min(Floats a, Floats b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
INLINE Floats absolute(Floats a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
INLINE Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
INLINE Ints to_ints(Floats a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
INLINE __m256i half_away(__m256 a) {
  const __m256 sign = _mm256_and_ps(a, _mm256_set1_ps(-0.0f));
  const __m256 half = _mm256_or_ps(sign, _mm256_set1_ps(below_half));
  return _mm256_cvttps_epi32(_mm256_add_ps(a, half));
}
INLINE Ints to_ints_half_away(Floats a) { return {half_away(a.lo), half_away(a.hi)}; }
INLINE Ints load(const int32_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
INLINE void store(int32_t* p, Ints x) {
  __m256i* q = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.lo);
  _mm256_storeu_si256(q + 1, x.hi);
}
INLINE Ints operator+(Ints a, Ints b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
INLINE Ints operator-(Ints a, Ints b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
INLINE Ints operator*(Ints a, Ints b) {
  return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}
INLINE Ints paired(Ints low, Ints high) {
  return {_mm256_blend_epi16(low.lo, _mm256_slli_epi32(high.lo, 16), 0xAA),
          _mm256_blend_epi16(low.hi, _mm256_slli_epi32(high.hi, 16), 0xAA)};
}
INLINE Ints add_pairs(Ints sum, Ints pairs, int32_t pair) {
  const __m256i both = _mm256_set1_epi32(pair);
  return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(pairs.lo, both)),
          _mm256_add_epi32(sum.hi, _mm256_madd_epi16(pairs.hi, both))};
}
INLINE Ints broadcast_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE Ints shift_left_23(Ints a) {
  return {_mm256_slli_epi32(a.lo, 23), _mm256_slli_epi32(a.hi, 23)};
}
INLINE Ints shift_right(Ints a, int bits) {
  return {_mm256_srai_epi32(a.lo, bits), _mm256_srai_epi32(a.hi, bits)};
}
INLINE Floats bits_as_floats(Ints a) {
  return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)};
}
INLINE Ints bits_as_ints(Floats a) {
  return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)};
}
INLINE Ints max(Ints a, Ints b) {
  return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)};
}
INLINE Floats load_half(const uint16_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
INLINE Floats load_e4m3(const uint8_t* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i mask = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), mask);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
INLINE void store_half(uint16_t* p, Floats x) {
  __m128i* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(x.lo, 0));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(x.hi, 0));
}
INLINE Floats load_bfloat(const uint16_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  __m256i lo = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), 16);
  __m256i hi = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1)), 16);
  return {_mm256_castsi256_ps(lo), _mm256_castsi256_ps(hi)};
}
INLINE Ints load_unsigned_bytes(const uint8_t* p) {
  __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
INLINE Ints load_signed_bytes(const int8_t* p) {
  __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))};
}
INLINE __m128i bytes_of(Ints x) {
  __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.lo, x.hi), 0xD8);
  return _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
}
INLINE Floats first_lanes(Floats a, Floats b, int count) {
  const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i high = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
  const __m256i limit = _mm256_set1_epi32(count);
  __m256 take_lo = _mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, low));
  __m256 take_hi = _mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, high));
  return {_mm256_blendv_ps(b.lo, a.lo, take_lo), _mm256_blendv_ps(b.hi, a.hi, take_hi)};
}

#else  // portable

constexpr const char* unit_name = "portable";

struct Floats {
  float v[16];
};
struct Ints {
  int32_t v[16];
};

#define EACH_LANE for (int i = 0; i < 16; i++)
#define LANES(TYPE, EXPRESSION)    \
  {                                \
    TYPE r;                        \
    EACH_LANE r.v[i] = EXPRESSION; \
    return r;                      \
  }

// clang-format off
INLINE Floats load(const float* p) LANES(Floats, p[i])
INLINE void store(float* p, Floats x) { EACH_LANE p[i] = x.v[i]; }
INLINE void stream(float* p, Floats x) { store(p, x); }
INLINE Floats broadcast(float x) LANES(Floats, x)
INLINE Floats operator+(Floats a, Floats b) LANES(Floats, a.v[i] + b.v[i])
INLINE Floats operator-(Floats a, Floats b) LANES(Floats, a.v[i] - b.v[i])
INLINE Floats operator*(Floats a, Floats b) LANES(Floats, a.v[i] * b.v[i])
INLINE Floats operator/(Floats a, Floats b) LANES(Floats, a.v[i] / b.v[i])
INLINE Floats fma(Floats a, Floats b, Floats c) LANES(Floats, __builtin_fmaf(a.v[i], b.v[i], c.v[i]))
INLINE Floats max(Floats a, Floats b) LANES(Floats, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
INLINE Floats min(Floats a, Floats b) LANES(Floats, a.v[i] < b.v[i] ? a.v[i] : b.v[i])
INLINE Floats absolute(Floats a) LANES(Floats, __builtin_fabsf(a.v[i]))
INLINE Floats to_floats(Ints a) LANES(Floats, static_cast<float>(a.v[i]))
INLINE int32_t nearest(float x) {
  // What is out of range, and NaN, gives the most negative integer, as the other units' hardware.
  if (!(x >= -2147483648.0f && x < 2147483648.0f)) return INT32_MIN;
  return static_cast<int32_t>(__builtin_nearbyintf(x));
}
INLINE Ints to_ints(Floats a) LANES(Ints, nearest(a.v[i]))
INLINE int32_t half_away(float x) {
  if (!(x > -2147483648.0f && x < 2147483648.0f)) return INT32_MIN;
  return static_cast<int32_t>(x + __builtin_copysignf(below_half, x));
}
INLINE Ints to_ints_half_away(Floats a) LANES(Ints, half_away(a.v[i]))
INLINE Ints load(const int32_t* p) LANES(Ints, p[i])
INLINE void store(int32_t* p, Ints x) { EACH_LANE p[i] = x.v[i]; }
INLINE uint32_t bits_of(int32_t x) { return static_cast<uint32_t>(x); }
INLINE int32_t wrapped(uint32_t x) { return static_cast<int32_t>(x); }
INLINE Ints operator+(Ints a, Ints b) LANES(Ints, wrapped(bits_of(a.v[i]) + bits_of(b.v[i])))
INLINE Ints operator-(Ints a, Ints b) LANES(Ints, wrapped(bits_of(a.v[i]) - bits_of(b.v[i])))
INLINE Ints operator*(Ints a, Ints b) LANES(Ints, wrapped(bits_of(a.v[i]) * bits_of(b.v[i])))
INLINE int32_t low_word(int32_t x) { return static_cast<int16_t>(bits_of(x) & 0xffff); }
INLINE int32_t high_word(int32_t x) { return static_cast<int16_t>(bits_of(x) >> 16); }
INLINE Ints paired(Ints low, Ints high) LANES(
    Ints, wrapped((bits_of(low.v[i]) & 0xffff) | bits_of(high.v[i]) << 16))
INLINE Ints add_pairs(Ints sum, Ints pairs, int32_t pair) LANES(
    Ints, sum.v[i] + low_word(pairs.v[i]) * low_word(pair) + high_word(pairs.v[i]) * high_word(pair))
INLINE Ints broadcast_int(int32_t x) LANES(Ints, x)
INLINE Ints shift_left_23(Ints a) LANES(Ints, wrapped(bits_of(a.v[i]) << 23))
INLINE Ints shift_right(Ints a, int bits) LANES(Ints, a.v[i] >> bits)
INLINE Floats bits_as_floats(Ints a) LANES(Floats, float_of_bits(bits_of(a.v[i])))
INLINE Ints bits_as_ints(Floats a) LANES(Ints, wrapped(bits_of_float(a.v[i])))
INLINE Ints max(Ints a, Ints b) LANES(Ints, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
INLINE Floats load_half(const uint16_t* p) LANES(Floats, float_of_half(p[i]))
INLINE Floats load_e4m3(const uint8_t* p) LANES(Floats, float_of_half(half_of_e4m3(p[i])))
INLINE void store_half(uint16_t* p, Floats x) { EACH_LANE p[i] = half_of_float(x.v[i]); }
INLINE Floats load_bfloat(const uint16_t* p) LANES(Floats, float_of_bits(uint32_t{p[i]} << 16))
INLINE Ints load_unsigned_bytes(const uint8_t* p) LANES(Ints, p[i])
INLINE Ints load_signed_bytes(const int8_t* p) LANES(Ints, p[i])
INLINE void store_bytes(int8_t* p, Ints x) { EACH_LANE p[i] = static_cast<int8_t>(x.v[i]); }
INLINE Floats first_lanes(Floats a, Floats b, int count) LANES(Floats, i < count ? a.v[i] : b.v[i])
// clang-format on

#endif

// ---- the same in all units

INLINE void stream_fence() {
#if defined(QUIRE_UNIT_AVX512) || defined(QUIRE_UNIT_AVX2)
  _mm_sfence();
#endif
}

INLINE float first_of(Floats x) {
#if defined(QUIRE_UNIT_AVX512)
  return _mm512_cvtss_f32(x.v);
#elif defined(QUIRE_UNIT_AVX2)
  return _mm256_cvtss_f32(x.lo);
#else
  return x.v[0];
#endif
}

// Lanes are added, and compared, in one tree: i with i+8, then +4, +2, +1.
#if defined(QUIRE_UNIT_AVX512) || defined(QUIRE_UNIT_AVX2)

#if defined(QUIRE_UNIT_AVX512)
INLINE __m256 low_half(Floats x) { return _mm512_castps512_ps256(x.v); }
INLINE __m256 high_half(Floats x) { return _mm512_extractf32x8_ps(x.v, 1); }
INLINE __m256i low_half(Ints x) { return _mm512_castsi512_si256(x.v); }
INLINE __m256i high_half(Ints x) { return _mm512_extracti64x4_epi64(x.v, 1); }
#else
INLINE __m256 low_half(Floats x) { return x.lo; }
INLINE __m256 high_half(Floats x) { return x.hi; }
INLINE __m256i low_half(Ints x) { return x.lo; }
INLINE __m256i high_half(Ints x) { return x.hi; }
#endif

// The lowest byte of each lane; lanes must be within -128 to 127.
INLINE void store_bytes(int8_t* p, Ints x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes_of(x));
}

INLINE float sum_of_lanes(Floats x) {
  const __m256 eight = _mm256_add_ps(low_half(x), high_half(x));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
INLINE float max_of_lanes(Floats x) {
  const __m256 eight = _mm256_max_ps(low_half(x), high_half(x));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
INLINE int32_t sum_of_lanes(Ints x) {
  const __m256i eight = _mm256_add_epi32(low_half(x), high_half(x));
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}
INLINE int32_t max_of_lanes(Ints x) {
  const __m256i eight = _mm256_max_epi32(low_half(x), high_half(x));
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}

#else

#define FOLD_LANES(EXPRESSION)                   \
  for (int width = 8; width > 0; width /= 2)     \
    for (int i = 0; i < width; i++) {            \
      const auto a = x.v[i], b = x.v[i + width]; \
      x.v[i] = EXPRESSION;                       \
    }                                            \
  return x.v[0];

// clang-format off
INLINE float sum_of_lanes(Floats x) { FOLD_LANES(a + b) }
INLINE float max_of_lanes(Floats x) { FOLD_LANES(a > b ? a : b) }
INLINE int32_t sum_of_lanes(Ints x) { FOLD_LANES(a + b) }
INLINE int32_t max_of_lanes(Ints x) { FOLD_LANES(a > b ? a : b) }
// clang-format on

#endif

// e^x to 2 ulp by arithmetic alone, so that it is the same everywhere. x is clamped to
// [-87.3, 88.3]: the result is neither 0 nor infinity. NaN stays NaN (max and min return the second
// of unordered operands).
INLINE Floats exponential(Floats x) {
  x = max(broadcast(-87.3f), min(broadcast(88.3f), x));
  const Floats n = to_floats(to_ints(x * broadcast(1.44269504088896341f)));
  Floats r = fma(n, broadcast(-0.693145751953125f), x);
  r = fma(n, broadcast(-1.42860682030941723212e-6f), r);
  Floats p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  const Floats one = broadcast(1.0f);
  p = fma(p, r * r, r) + one;
  const Ints exponent = shift_left_23(to_ints(n) + broadcast_int(127));
  return p * bits_as_floats(exponent);
}
