// Codes of the formats with grids (grids.h) in this unit's vector registers: two vectors at once,
// of the eight weights of a point.

// ---- sixteen numbers of points, one of each row

#if defined(QUIRE_UNIT_AVX512) || defined(QUIRE_UNIT_AVX2)

struct Numbers {
  __m256i v;  // 16 bits each
};
INLINE Numbers numbers_of_bytes(const uint8_t* p) {
  return {_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
INLINE __m128i sixteen_nibbles(const uint8_t* p) {
  const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm_and_si128(_mm_unpacklo_epi64(x, _mm_srli_epi16(x, 4)), _mm_set1_epi8(15));
}
INLINE Numbers numbers_of_nibbles(const uint8_t* p) {
  return {_mm256_cvtepu8_epi16(sixteen_nibbles(p))};
}
INLINE Numbers operator|(Numbers a, Numbers b) { return {_mm256_or_si256(a.v, b.v)}; }
// Bits from `from` on, moved to `to`; the mask is of the result.
INLINE Numbers moved(Numbers a, int from, int to, int mask) {
  const __m256i x =
      from >= to ? _mm256_srli_epi16(a.v, from - to) : _mm256_slli_epi16(a.v, to - from);
  return {_mm256_and_si256(x, _mm256_set1_epi16(static_cast<short>(mask)))};
}
// The numbers are loaded one by one; GCC would take them from the vector, which is slower.
INLINE void store(uint16_t (&to)[16], Numbers x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x.v);
  asm("" : "+m"(to));
}

#else

struct Numbers {
  uint16_t v[16];
};
// clang-format off
INLINE Numbers numbers_of_bytes(const uint8_t* p) LANES(Numbers, p[i])
INLINE Numbers numbers_of_nibbles(const uint8_t* p) LANES(Numbers, p[i % 8] >> (i / 8 * 4) & 15)
INLINE Numbers operator|(Numbers a, Numbers b) LANES(Numbers, a.v[i] | b.v[i])
INLINE Numbers moved(Numbers a, int from, int to, int mask) LANES(
    Numbers, static_cast<uint16_t>((from >= to ? a.v[i] >> (from - to) : a.v[i] << (to - from)) & mask))
INLINE void store(uint16_t (&to)[16], Numbers x) { EACH_LANE to[i] = x.v[i]; }
// clang-format on

#endif

// ---- points of these numbers, signs, and scales

#if defined(QUIRE_UNIT_AVX512) || defined(QUIRE_UNIT_AVX2)

// Loads of single points, faster than the gather instructions. The order of rows is such that one
// shuffle of two results parts first halves from second ones.
template <class Number>
INLINE __m128i two_points(const uint64_t* grid, const Number* n) {
  return _mm_insert_epi64(_mm_cvtsi64_si128(static_cast<int64_t>(grid[n[0]])),
                          static_cast<int64_t>(grid[n[1]]), 1);
}
template <class Number>
INLINE __m256i four_points(const uint64_t* grid, const Number* n) {  // rows 0, 1, 4 and 5 from n on
  return _mm256_inserti128_si256(_mm256_castsi128_si256(two_points(grid, n)),
                                 two_points(grid, n + 4), 1);
}
template <class Number>
INLINE __m128i four_points(const uint32_t* grid, const Number* n) {
  const auto at = [&](int i) { return static_cast<int>(grid[n[i]]); };
  return _mm_setr_epi32(at(0), at(1), at(2), at(3));
}
template <class Number>
INLINE __m256i eight_points(const uint32_t* grid, const Number* n) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(four_points(grid, n)),
                                 four_points(grid, n + 4), 1);
}
// One half of each of eight points; which: 0x88 or 0xdd.
template <int which>
INLINE __m256i halves_of_points(__m256i a, __m256i b) {
  return _mm256_castps_si256(
      _mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), which));
}
#endif

#if defined(QUIRE_UNIT_AVX512)

INLINE Codes joined(__m256i low, __m256i high) {
  return {_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)};
}
// Minus where the bit of vector j is set; signed_codes of that.
INLINE Codes with_signs(Codes sizes, const uint8_t* signs, int j) {
  const __mmask64 minus = _mm512_movepi8_mask(shifted(load_codes(signs), j - 7).v);
  const __m512i zero = _mm512_set1_epi8(static_cast<char>(0x80));
  return {_mm512_mask_sub_epi8(_mm512_add_epi8(zero, sizes.v), minus, zero, sizes.v)};
}
// `value` in all bytes of the rows whose nibble has this bit.
INLINE Codes where_bit(const uint8_t* nibbles, int bit, uint8_t value) {
  const __m512i x = _mm512_cvtepu8_epi32(sixteen_nibbles(nibbles));
  return {_mm512_maskz_mov_epi32(_mm512_test_epi32_mask(x, _mm512_set1_epi32(1 << bit)),
                                 _mm512_set1_epi8(static_cast<char>(value)))};
}
INLINE Ints nibble_field(const uint8_t* p, int i) {
  return {_mm512_cvtepu8_epi32(sixteen_nibbles(p + 8 * i))};
}

#elif defined(QUIRE_UNIT_AVX2)

INLINE Codes joined(__m256i low, __m256i high) { return {low, high}; }
INLINE Codes with_signs(Codes sizes, const uint8_t* signs, int j) {
  const Codes minus = one_bit(signs, j, 7);
  const __m256i one = _mm256_set1_epi8(1);
  return {_mm256_sign_epi8(sizes.lo, _mm256_or_si256(minus.lo, one)),
          _mm256_sign_epi8(sizes.hi, _mm256_or_si256(minus.hi, one))};
}
INLINE Ints nibble_field(const uint8_t* p, int i) {
  const __m128i x = sixteen_nibbles(p + 8 * i);
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
INLINE Codes where_bit(const uint8_t* nibbles, int bit, uint8_t value) {
  const Ints x = nibble_field(nibbles, 0);
  const auto spread = [&](__m256i y) {
    return _mm256_srai_epi32(_mm256_slli_epi32(y, 31 - bit), 31);
  };
  return Codes{spread(x.lo), spread(x.hi)} & value;
}

#endif

#if defined(QUIRE_UNIT_AVX512) || defined(QUIRE_UNIT_AVX2)

template <class Number>
INLINE void look_up(const uint64_t* grid, const Number* n, Codes* two) {
  const __m256i a = four_points(grid, n), b = four_points(grid, n + 2);
  const __m256i c = four_points(grid, n + 8), d = four_points(grid, n + 10);
  two[0] = joined(halves_of_points<0x88>(a, b), halves_of_points<0x88>(c, d));
  two[1] = joined(halves_of_points<0xdd>(a, b), halves_of_points<0xdd>(c, d));
}
template <class Number>
INLINE Codes look_up(const uint32_t* grid, const Number* n) {
  return joined(eight_points(grid, n), eight_points(grid, n + 8));
}

#else

template <class Number>
INLINE void look_up(const uint64_t* grid, const Number* n, Codes* two) {
  for (int k = 0; k < 8; k++)
    for (int row = 0; row < 16; row++)
      two[k / 4].v[4 * row + k % 4] = static_cast<uint8_t>(grid[n[row]] >> (8 * k));
}
template <class Number>
INLINE Codes look_up(const uint32_t* grid, const Number* n) {
  Codes codes;
  for (int i = 0; i < 64; i++) codes.v[i] = static_cast<uint8_t>(grid[n[i / 4]] >> (8 * (i % 4)));
  return codes;
}
INLINE Codes with_signs(Codes sizes, const uint8_t* signs, int j) {
  for (int i = 0; i < 64; i++)
    if (signs[i] >> j & 1) sizes.v[i] = static_cast<uint8_t>(-sizes.v[i]);
  return sizes;
}
INLINE Codes where_bit(const uint8_t* nibbles, int bit, uint8_t value) {
  Codes codes;
  for (int i = 0; i < 64; i++)
    codes.v[i] = nibbles[i / 4 % 8] >> (i / 32 * 4 + bit) & 1 ? value : uint8_t{0};
  return codes;
}
INLINE Ints nibble_field(const uint8_t* p, int i) {
  Ints x;
  for (int row = 0; row < 16; row++) x.v[row] = p[8 * i + row % 8] >> (row / 8 * 4) & 15;
  return x;
}

#endif

// ---- the formats

// 2 s + 1 of the i-th scale.
INLINE Ints odd_scale(const uint8_t* record, int i) {
  const Ints s = nibble_field(record + 32, i);
  return s + s + broadcast_int(1);
}

// All numbers of a sub-block are stored before the first of them is loaded again: a load right
// behind the store that it reads would wait for it.
template <int points>
struct alignas(64) SubBlockNumbers {  // no store of it lies in two cache lines
  uint16_t of[points][16];
};

// IQ2 and IQ3: d / `divisor` times an odd scale, times points with signs.
template <int format, int bits, bool per_half, int divisor>
struct SignedGrid : Traits<format, bits, 0, per_half, false, true> {
  static constexpr int vectors_at_once = 2;
  INLINE_STATIC Floats super_scale(const uint8_t* r) {
    return half_field(r, 0) * broadcast(1.0f / divisor);
  }
  INLINE_STATIC Ints sub_scale(const uint8_t* r, int i) { return odd_scale(r, i); }
  INLINE_STATIC void give_signs(const uint8_t* p, int i, Codes* two) {
    two[0] = with_signs(two[0], p + grid_signs(format), 2 * i);
    two[1] = with_signs(two[1], p + grid_signs(format), 2 * i + 1);
  }
};
struct AsIQ2_XXS : SignedGrid<IQ2_XXS, 6, false, 8> {
  INLINE_STATIC void two_codes(const uint8_t* p, Nothing, int i, Codes* two) {
    look_up(grids.iq2_xxs, p + 16 * i, two);
    give_signs(p, i, two);
  }
};
struct AsIQ2_XS : SignedGrid<IQ2_XS, 6, true, 8> {
  using Prepared = SubBlockNumbers<4>;
  INLINE_STATIC void prepare(const uint8_t* p, Prepared& to) {
    const Numbers more = numbers_of_nibbles(p + grid_more(IQ2_XS));
    UNROLL(4)
    for (int i = 0; i < 4; i++)
      store(to.of[i], numbers_of_bytes(p + 16 * i) | moved(more, i, 8, 0x100));
  }
  INLINE_STATIC void two_codes(const uint8_t* p, const Prepared& numbers, int i, Codes* two) {
    look_up(grids.iq2_xs, numbers.of[i], two);
    give_signs(p, i, two);
  }
};
struct AsIQ2_S : SignedGrid<IQ2_S, 6, true, 8> {
  using Prepared = SubBlockNumbers<4>;
  INLINE_STATIC void prepare(const uint8_t* p, Prepared& to) {
    const Numbers more = numbers_of_bytes(p + grid_more(IQ2_S));
    UNROLL(4)
    for (int i = 0; i < 4; i++)
      store(to.of[i], numbers_of_bytes(p + 16 * i) | moved(more, 2 * i, 8, 0x300));
  }
  INLINE_STATIC void two_codes(const uint8_t* p, const Prepared& numbers, int i, Codes* two) {
    look_up(grids.iq2_s, numbers.of[i], two);
    give_signs(p, i, two);
  }
};
struct AsIQ3_XXS : SignedGrid<IQ3_XXS, 6, false, 4> {
  INLINE_STATIC void two_codes(const uint8_t* p, Nothing, int i, Codes* two) {
    two[0] = look_up(grids.iq3_xxs, p + 32 * i);
    two[1] = look_up(grids.iq3_xxs, p + 32 * i + 16);
    give_signs(p, i, two);
  }
};
struct AsIQ3_S : SignedGrid<IQ3_S, 4, false, 1> {
  using Prepared = SubBlockNumbers<8>;
  INLINE_STATIC void prepare(const uint8_t* p, Prepared& to) {
    const Numbers more = numbers_of_bytes(p + grid_more(IQ3_S));
    UNROLL(8)
    for (int i = 0; i < 8; i++)
      store(to.of[i], numbers_of_bytes(p + 16 * i) | moved(more, i, 8, 0x100));
  }
  INLINE_STATIC void two_codes(const uint8_t* p, const Prepared& numbers, int i, Codes* two) {
    two[0] = look_up(grids.iq3_s, numbers.of[2 * i]);
    two[1] = look_up(grids.iq3_s, numbers.of[2 * i + 1]);
    give_signs(p, i, two);
  }
};

template <class T>
struct IQ1 : T {
  static constexpr int vectors_at_once = 2;
  using Prepared = SubBlockNumbers<4>;
  INLINE_STATIC void prepare(const uint8_t* p, Prepared& to) {
    const Numbers more = numbers_of_bytes(p + grid_more(IQ1_S));
    const Numbers third = numbers_of_nibbles(p + iq1_third_bit);
    UNROLL(4)
    for (int i = 0; i < 4; i++)
      store(to.of[i], numbers_of_bytes(p + 16 * i) | moved(more, 2 * i, 8, 0x300) |
                          moved(third, i, 10, 0x400));
  }
};
// A minimum of 7 / 8 where weights are moved up, of 9 / 8 where they are moved down.
struct AsIQ1_S : IQ1<Traits<IQ1_S, 2, 0, false, true, false>> {
  INLINE_STATIC void two_codes(const uint8_t*, const Prepared& numbers, int i, Codes* two) {
    look_up(grids.iq1, numbers.of[i], two);
  }
  INLINE_STATIC Floats super_scale(const uint8_t* r) { return half_field(r, 0); }
  INLINE_STATIC Floats super_minimum(const uint8_t* r) {
    return half_field(r, 0) * broadcast(0.125f);
  }
  INLINE_STATIC Ints down(const uint8_t* r, int i) {
    return shift_right(nibble_field(r + 32, i), 3);
  }
  INLINE_STATIC Ints sub_scale(const uint8_t* r, int i) {
    return odd_scale(r, i) - down(r, i) * broadcast_int(16);
  }
  INLINE_STATIC Ints sub_minimum(const uint8_t* r, int i) {
    const Ints two_down = down(r, i) + down(r, i);
    return sub_scale(r, i) * (broadcast_int(7) + two_down);
  }
};
// Codes are 8 times the point, and 2 where it is moved up: 9 less than that is meant.
struct AsIQ1_M : IQ1<Traits<IQ1_M, 5, 9, true, false, false>> {
  INLINE_STATIC void two_codes(const uint8_t* p, const Prepared& numbers, int i, Codes* two) {
    look_up(grids.iq1, numbers.of[i], two);
    const Codes up = where_bit(p + iq1_m_up, i, 2);
    for (int j = 0; j < 2; j++) two[j] = shifted(two[j], -3) | up;
  }
  INLINE_STATIC Floats super_scale(const uint8_t* r) {
    return half_field(r, 0) * broadcast(0.125f);
  }
  INLINE_STATIC Ints sub_scale(const uint8_t* r, int i) { return odd_scale(r, i); }
};
