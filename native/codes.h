// Codes and scales of the packed formats (formats.h) in this unit's vector registers.

// ---- 64 codes: sixteen rows times four k

#if defined(QUIRE_UNIT_AVX512)

struct Codes {
  __m512i v;
};
constexpr int panels_at_once = 2;
constexpr bool signed_as_unsigned = true;  // signed codes + 128: this unit's sums do not saturate

INLINE Codes load_codes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
INLINE void store_codes(uint8_t* p, Codes x) { _mm512_storeu_si512(p, x.v); }
INLINE Codes operator&(Codes a, uint8_t mask) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi8(static_cast<char>(mask)))};
}
INLINE Codes operator|(Codes a, Codes b) { return {_mm512_or_si512(a.v, b.v)}; }
INLINE Codes flip_sign(Codes a) {
  return {_mm512_xor_si512(a.v, _mm512_set1_epi8(static_cast<char>(0x80)))};
}
// Bits that cross into the neighbouring byte must be masked away afterwards.
INLINE Codes shifted(Codes a, int right) {
  return {right >= 0 ? _mm512_srli_epi16(a.v, static_cast<unsigned>(right))
                     : _mm512_slli_epi16(a.v, static_cast<unsigned>(-right))};
}
INLINE Codes looked_up(const int8_t* table, Codes a) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), a.v)};
}

INLINE int32_t four(const int8_t* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return x;
}

// Sums of products over the vectors of a sub-block, sixteen rows.
template <int bits, bool is_signed>
struct Dot {
  __m512i sum;
  INLINE_METHOD void add(Codes w, const int8_t* a, int j, int first) {
    if (j == first) sum = _mm512_setzero_si512();
    sum = _mm512_dpbusd_epi32(sum, w.v, _mm512_set1_epi32(four(a)));
  }
  INLINE_METHOD Ints total() const { return {sum}; }
};

// Sums of products of ternary codes, over a whole row; `widen` is called at the end and after 64
// vectors at most. Codes may lie at any bits of their byte.
constexpr int max_tokens_apart = 2;  // more sums would not fit the registers
struct TernaryDot {
  __m512i sum;
  INLINE_METHOD void clear() { sum = _mm512_setzero_si512(); }
  INLINE_METHOD void add(Codes w, const int8_t* a) {
    sum = _mm512_dpbusd_epi32(sum, w.v, _mm512_set1_epi32(four(a)));
  }
  INLINE_METHOD void widen() {}
  INLINE_METHOD Ints total() const { return {sum}; }
};

#elif defined(QUIRE_UNIT_AVX2)

struct Codes {
  __m256i lo, hi;
};
constexpr int panels_at_once = 1;
constexpr bool signed_as_unsigned = false;

INLINE Codes load_codes(const uint8_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
INLINE void store_codes(uint8_t* p, Codes x) {
  __m256i* q = reinterpret_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.lo);
  _mm256_storeu_si256(q + 1, x.hi);
}
INLINE Codes operator&(Codes a, uint8_t mask) {
  const __m256i m = _mm256_set1_epi8(static_cast<char>(mask));
  return {_mm256_and_si256(a.lo, m), _mm256_and_si256(a.hi, m)};
}
INLINE Codes operator|(Codes a, Codes b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
INLINE Codes shifted(Codes a, int right) {
  if (right >= 0) return {_mm256_srli_epi16(a.lo, right), _mm256_srli_epi16(a.hi, right)};
  return {_mm256_slli_epi16(a.lo, -right), _mm256_slli_epi16(a.hi, -right)};
}
INLINE Codes looked_up(const int8_t* table, Codes a) {
  const __m256i values =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  return {_mm256_shuffle_epi8(values, a.lo), _mm256_shuffle_epi8(values, a.hi)};
}

INLINE int32_t four(const int8_t* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return x;
}

// Keeps GCC from reassociating these sums, which spills registers.
#define KEEP(x) asm volatile("" : "+x"(x))

// Pairs of products are added in 16 bits while no sum of such codes times 127 can overflow, then
// widened.
template <int bits, bool is_signed>
struct Dot {
  static constexpr int run = bits <= 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
  __m256i narrow_lo, narrow_hi, sum_lo, sum_hi;
  INLINE_METHOD void add(Codes w, const int8_t* a, int j, int first) {
    const __m256i b = _mm256_set1_epi32(four(a));
    __m256i x, y;
    if (is_signed) {
      x = _mm256_maddubs_epi16(_mm256_abs_epi8(w.lo), _mm256_sign_epi8(b, w.lo));
      y = _mm256_maddubs_epi16(_mm256_abs_epi8(w.hi), _mm256_sign_epi8(b, w.hi));
    } else {
      x = _mm256_maddubs_epi16(w.lo, b);
      y = _mm256_maddubs_epi16(w.hi, b);
    }
    const int step = (j - first) % run;
    narrow_lo = step == 0 ? x : _mm256_add_epi16(narrow_lo, x);
    narrow_hi = step == 0 ? y : _mm256_add_epi16(narrow_hi, y);
    KEEP(narrow_lo);
    KEEP(narrow_hi);
    if (run < 8 && step == run - 1) widen(j - first < run);
  }
  INLINE_METHOD void widen(bool is_first) {
    const __m256i one = _mm256_set1_epi16(1);
    const __m256i x = _mm256_madd_epi16(narrow_lo, one), y = _mm256_madd_epi16(narrow_hi, one);
    sum_lo = is_first ? x : _mm256_add_epi32(sum_lo, x);
    sum_hi = is_first ? y : _mm256_add_epi32(sum_hi, y);
  }
  INLINE_METHOD Ints total() {
    if (run == 8) widen(true);
    return {sum_lo, sum_hi};
  }
};

// 64 pairs of products of codes up to 2 and bytes fit 16 bits: 64 * 2 * 2 * 127 = 32512.
constexpr int max_tokens_apart = 0;
struct TernaryDot {
  __m256i narrow_lo, narrow_hi, sum_lo, sum_hi;
  INLINE_METHOD void clear() { narrow_lo = narrow_hi = sum_lo = sum_hi = _mm256_setzero_si256(); }
  INLINE_METHOD void add(Codes w, const int8_t* a) {
    const __m256i b = _mm256_set1_epi32(four(a));
    narrow_lo = _mm256_add_epi16(narrow_lo, _mm256_maddubs_epi16(w.lo, b));
    narrow_hi = _mm256_add_epi16(narrow_hi, _mm256_maddubs_epi16(w.hi, b));
    KEEP(narrow_lo);
    KEEP(narrow_hi);
  }
  INLINE_METHOD void widen() {
    const __m256i one = _mm256_set1_epi16(1);
    sum_lo = _mm256_add_epi32(sum_lo, _mm256_madd_epi16(narrow_lo, one));
    sum_hi = _mm256_add_epi32(sum_hi, _mm256_madd_epi16(narrow_hi, one));
    narrow_lo = narrow_hi = _mm256_setzero_si256();
  }
  INLINE_METHOD Ints total() const { return {sum_lo, sum_hi}; }
};

#else  // portable

struct Codes {
  uint8_t v[64];
};
constexpr int panels_at_once = 1;
constexpr bool signed_as_unsigned = false;

INLINE Codes load_codes(const uint8_t* p) {
  Codes r;
  __builtin_memcpy(r.v, p, 64);
  return r;
}
INLINE void store_codes(uint8_t* p, Codes x) { __builtin_memcpy(p, x.v, 64); }
INLINE Codes operator&(Codes a, uint8_t mask) {
  for (auto& x : a.v) x &= mask;
  return a;
}
INLINE Codes operator|(Codes a, Codes b) {
  for (int i = 0; i < 64; i++) a.v[i] |= b.v[i];
  return a;
}
INLINE Codes shifted(Codes a, int right) {
  for (auto& x : a.v) x = static_cast<uint8_t>(right >= 0 ? x >> right : x << -right);
  return a;
}
INLINE Codes looked_up(const int8_t* table, Codes a) {
  for (auto& x : a.v) x = static_cast<uint8_t>(table[x]);
  return a;
}

template <int bits, bool is_signed>
struct Dot {
  Ints sum;
  INLINE_METHOD void add(const Codes& w, const int8_t* a, int j, int first) {
    if (j == first) sum = broadcast_int(0);
    for (int row = 0; row < 16; row++)
      for (int i = 0; i < 4; i++) {
        const uint8_t code = w.v[4 * row + i];
        sum.v[row] += (is_signed ? static_cast<int8_t>(code) : code) * a[i];
      }
  }
  INLINE_METHOD Ints total() const { return sum; }
};

constexpr int max_tokens_apart = 0;
struct TernaryDot {
  Ints sum;
  INLINE_METHOD void clear() { sum = broadcast_int(0); }
  INLINE_METHOD void add(const Codes& w, const int8_t* a) {
    for (int row = 0; row < 16; row++)
      for (int i = 0; i < 4; i++) sum.v[row] += w.v[4 * row + i] * a[i];
  }
  INLINE_METHOD void widen() {}
  INLINE_METHOD Ints total() const { return sum; }
};

#endif

// ---- codes from their planes

INLINE Codes four_bits(const uint8_t* p, int j) {
  const Codes v = load_codes(p + 64 * (j & 3));
  return (j < 4 ? v : shifted(v, 4)) & 15;
}
// Two bits of each code, at bit `to` of the result.
INLINE Codes two_bits(const uint8_t* p, int j, int to) {
  return shifted(load_codes(p + 64 * (j & 1)), 2 * (j >> 1) - to) & static_cast<uint8_t>(3 << to);
}
INLINE Codes one_bit(const uint8_t* p, int j, int to) {
  return shifted(load_codes(p), j - to) & static_cast<uint8_t>(1 << to);
}

INLINE Codes signed_codes(Codes x) {
#if defined(QUIRE_UNIT_AVX512)
  return flip_sign(x);
#else
  return x;
#endif
}

// ---- scales

INLINE Floats half_field(const uint8_t* record, int field) {
  return load_half(reinterpret_cast<const uint16_t*>(record) + 16 * field);
}
INLINE Floats float_field(const uint8_t* record, int field) {
  return load(reinterpret_cast<const float*>(record) + 16 * field);
}
INLINE Ints unsigned_field(const uint8_t* bytes, int field) {
  return load_unsigned_bytes(bytes + 16 * field);
}
INLINE Ints signed_field(const uint8_t* bytes, int field) {
  return load_signed_bytes(reinterpret_cast<const int8_t*>(bytes) + 16 * field);
}

struct Nothing {};

// A format's traits: bits of its codes (as multiplied), the zero point subtracted from each code,
// whether scales are per half sub-block and whether there are minimums.
template <int format_, int bits_, int zero_, bool per_half_, bool has_minimum_, bool is_signed_>
struct Traits {
  static constexpr int format = format_, bits = bits_;
  static constexpr bool per_half = per_half_, has_minimum = has_minimum_;
  static constexpr bool is_signed = is_signed_ && !signed_as_unsigned;
  static constexpr int zero = is_signed_ && signed_as_unsigned ? 128 : zero_;
  static constexpr bool in_blocks = takes_blocks(format_);
  static_assert(in_blocks || !(per_half_ && has_minimum_), "groups have one minimum");
  static_assert(!has_minimum_ || zero_ == 0, "sums of codes serve the one or the other");
  static constexpr FormatInfo info = format_infos[format_];
  static constexpr int vectors_at_once = 1;  // that codes are made of
  using Prepared = Nothing;                  // what is read of a sub-block before its codes
  INLINE_STATIC void prepare(const uint8_t*, Prepared&) {}
};

// Formats in groups have a scale, and with has_minimum a minimum, for each sub-block; where scales
// are per half, `half_scale` gives the i-th of a record.
struct AsQ8_0 : Traits<Q8_0, 8, 0, false, false, true> {
  INLINE_STATIC Codes codes(const uint8_t* p, int j) {
    return signed_codes(load_codes(p + 64 * j));
  }
  INLINE_STATIC Floats scale(const uint8_t* r) { return half_field(r, 0); }
};
struct AsQ4_0 : Traits<Q4_0, 4, 8, false, false, false> {
  INLINE_STATIC Codes codes(const uint8_t* p, int j) { return four_bits(p, j); }
  INLINE_STATIC Floats scale(const uint8_t* r) { return half_field(r, 0); }
};
struct AsQ4_1 : Traits<Q4_1, 4, 0, false, true, false> {
  INLINE_STATIC Codes codes(const uint8_t* p, int j) { return four_bits(p, j); }
  INLINE_STATIC Floats scale(const uint8_t* r) { return half_field(r, 0); }
  INLINE_STATIC Floats minimum(const uint8_t* r) { return half_field(r, 1); }
};
struct AsQ5_0 : Traits<Q5_0, 5, 16, false, false, false> {
  INLINE_STATIC Codes codes(const uint8_t* p, int j) {
    return four_bits(p, j) | one_bit(p + 256, j, 4);
  }
  INLINE_STATIC Floats scale(const uint8_t* r) { return half_field(r, 0); }
};
struct AsQ5_1 : Traits<Q5_1, 5, 0, false, true, false> {
  INLINE_STATIC Codes codes(const uint8_t* p, int j) {
    return four_bits(p, j) | one_bit(p + 256, j, 4);
  }
  INLINE_STATIC Floats scale(const uint8_t* r) { return half_field(r, 0); }
  INLINE_STATIC Floats minimum(const uint8_t* r) { return half_field(r, 1); }
};
struct AsIQ4_NL : Traits<IQ4_NL, 8, 0, false, false, true> {
  INLINE_STATIC Codes codes(const uint8_t* p, int j) {
    return signed_codes(looked_up(iq4_values, four_bits(p, j)));
  }
  INLINE_STATIC Floats scale(const uint8_t* r) { return half_field(r, 0); }
};
struct AsMXFP4 : Traits<MXFP4, 5, mxfp4_zero, false, false, false> {
  INLINE_STATIC Codes codes(const uint8_t* p, int j) {
    return looked_up(mxfp4_codes, four_bits(p, j));
  }
  // 2 ** (byte - 128) as the bits of a float: of bytes 0 and 1 a subnormal one, which the second
  // operand is.
  INLINE_STATIC Floats scale(const uint8_t* r) {
    const Ints byte = unsigned_field(r, 0), one = broadcast_int(1);
    const Ints subnormal = (byte + one) * broadcast_int(1 << 21);
    return bits_as_floats(max(shift_left_23(byte - one), subnormal));
  }
};
struct AsNVFP4 : Traits<NVFP4, 5, mxfp4_zero, true, false, false> {
  INLINE_STATIC Codes codes(const uint8_t* p, int j) { return AsMXFP4::codes(p, j); }
  INLINE_STATIC Floats half_scale(const uint8_t* r, int i) {
    return load_e4m3(r + 16 * i) * broadcast(nvfp4_factor);
  }
};
struct AsNVFP4_128 : Traits<NVFP4_128, 5, mxfp4_zero, true, false, false> {
  INLINE_STATIC Codes codes(const uint8_t* p, int j) { return AsMXFP4::codes(p, j); }
  INLINE_STATIC Floats half_scale(const uint8_t* r, int i) {
    return float_field(r, 0) * AsNVFP4::half_scale(r + 64, i);
  }
};
struct AsQ1_0 : Traits<Q1_0, 2, 1, false, false, false> {  // 0 and 2
  INLINE_STATIC Codes codes(const uint8_t* p, int j) { return one_bit(p, j, 1); }
  INLINE_STATIC Floats scale(const uint8_t* r) { return half_field(r, 0); }
};
struct AsQ2_0 : Traits<Q2_0, 2, 1, false, false, false> {
  INLINE_STATIC Codes codes(const uint8_t* p, int j) { return two_bits(p, j, 0); }
  INLINE_STATIC Floats scale(const uint8_t* r) { return half_field(r, 0); }
};
struct AsU4_128 : Traits<U4_128, 4, 0, false, true, false> {
  INLINE_STATIC Codes codes(const uint8_t* p, int j) { return four_bits(p, j); }
  INLINE_STATIC Floats scale(const uint8_t* r) { return float_field(r, 0); }
  INLINE_STATIC Floats minimum(const uint8_t* r) {
    return broadcast(0.0f) - scale(r) * float_field(r, 1);
  }
};
struct AsI8_128 : Traits<I8_128, 8, 0, false, false, true> {
  INLINE_STATIC Codes codes(const uint8_t* p, int j) { return AsQ8_0::codes(p, j); }
  INLINE_STATIC Floats scale(const uint8_t* r) { return float_field(r, 0); }
};
struct AsTernary : Traits<TERNARY, 2, 1, false, false, false> {
  INLINE_STATIC Codes codes(const uint8_t* p, int j) { return two_bits(p, j, 0); }
  INLINE_STATIC Floats scale(const uint8_t* r) { return half_field(r, 0); }
};

// Formats in super-blocks: the i-th scale is super_scale * sub_scale(i), the i-th minimum is
// super_minimum * sub_minimum(i). There are sixteen of them where they are per half, else eight.
struct AsQ2_K : Traits<Q2_K, 2, 0, true, true, false> {
  INLINE_STATIC Codes codes(const uint8_t* p, int j) { return two_bits(p, j, 0); }
  INLINE_STATIC Floats super_scale(const uint8_t* r) { return half_field(r, 0); }
  INLINE_STATIC Floats super_minimum(const uint8_t* r) { return half_field(r, 1); }
  INLINE_STATIC Ints sub_scale(const uint8_t* r, int i) { return nibbles(r, i, 0); }
  INLINE_STATIC Ints sub_minimum(const uint8_t* r, int i) { return nibbles(r, i, 4); }
  INLINE_STATIC Ints nibbles(const uint8_t* r, int i, int shift) {
    uint8_t values[16];
    for (int row = 0; row < 16; row++)
      values[row] = static_cast<uint8_t>(r[64 + 16 * i + row] >> shift & 15);
    return load_unsigned_bytes(values);
  }
};
template <class T>
struct WithoutMinimums : T {
  INLINE_STATIC Floats super_scale(const uint8_t* r) { return half_field(r, 0); }
  INLINE_STATIC Ints sub_scale(const uint8_t* r, int i) { return signed_field(r + 32, i); }
};
struct AsQ3_K : WithoutMinimums<Traits<Q3_K, 3, 4, true, false, false>> {
  INLINE_STATIC Codes codes(const uint8_t* p, int j) {
    return two_bits(p, j, 0) | one_bit(p + 128, j, 2);
  }
};
struct AsQ6_K : WithoutMinimums<Traits<Q6_K, 6, 32, true, false, false>> {
  INLINE_STATIC Codes codes(const uint8_t* p, int j) {
    return four_bits(p, j) | two_bits(p + 256, j, 4);
  }
};
struct AsIQ4_XS : WithoutMinimums<Traits<IQ4_XS, 8, 0, false, false, true>> {
  INLINE_STATIC Codes codes(const uint8_t* p, int j) { return AsIQ4_NL::codes(p, j); }
};
template <class T>
struct WithMinimums : T {
  INLINE_STATIC Floats super_scale(const uint8_t* r) { return half_field(r, 0); }
  INLINE_STATIC Floats super_minimum(const uint8_t* r) { return half_field(r, 1); }
  INLINE_STATIC Ints sub_scale(const uint8_t* r, int i) { return unsigned_field(r + 64, i); }
  INLINE_STATIC Ints sub_minimum(const uint8_t* r, int i) { return unsigned_field(r + 192, i); }
};
struct AsQ4_K : WithMinimums<Traits<Q4_K, 4, 0, false, true, false>> {
  INLINE_STATIC Codes codes(const uint8_t* p, int j) { return four_bits(p, j); }
};
struct AsQ5_K : WithMinimums<Traits<Q5_K, 5, 0, false, true, false>> {
  INLINE_STATIC Codes codes(const uint8_t* p, int j) {
    return four_bits(p, j) | one_bit(p + 256, j, 4);
  }
};
