// Kernels of one row (token) at a time: rmsnorm, quantisation, gates, soft caps, rope.

// The first `count` values at p, then zeros: reads nothing past them.
INLINE Floats load_first(const float* p, int count) {
  float padded[16] = {};
  for (int i = 0; i < count; i++) padded[i] = p[i];
  return load(padded);
}

INLINE void store_first(float* p, Floats x, int count) {
  float padded[16];
  store(padded, x);
  for (int i = 0; i < count; i++) p[i] = padded[i];
}

INLINE int lanes_left(int64_t size, int64_t i) {
  return size - i < 16 ? static_cast<int>(size - i) : 16;
}

// out[i] = function(i-th vector of x); the last vector may be partial.
template <class Function>
INLINE void map_row(const float* x, int64_t size, float* out, Function function) {
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) store(out + i, function(load(x + i)));
  if (i < size) {
    const int count = lanes_left(size, i);
    store_first(out + i, function(load_first(x + i, count)), count);
  }
}

template <class Function>
INLINE void map_rows(const float* x, const float* y, int64_t size, float* out, Function function) {
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) store(out + i, function(load(x + i), load(y + i)));
  if (i < size) {
    const int count = lanes_left(size, i);
    const Floats last = function(load_first(x + i, count), load_first(y + i, count));
    store_first(out + i, last, count);
  }
}

// ---- rmsnorm

// Vector i is added to accumulator i % 4: four sums in flight, always in the same order.
INLINE float sum_of_squares(const float* x, int size) {
  Floats sums[4] = {broadcast(0.0f), broadcast(0.0f), broadcast(0.0f), broadcast(0.0f)};
  int i = 0;
  for (; i + 64 <= size; i += 64)
    for (int k = 0; k < 4; k++) {
      const Floats values = load(x + i + 16 * k);
      sums[k] = fma(values, values, sums[k]);
    }
  for (int k = 0; i < size; i += 16, k++) {
    const int count = lanes_left(size, i);
    const Floats values = count == 16 ? load(x + i) : load_first(x + i, count);
    sums[k] = fma(values, values, sums[k]);
  }
  return sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

void rms_norm(const float* x, const float* weight, int size, float epsilon, float* out) {
  const float mean = sum_of_squares(x, size) / static_cast<float>(size);
  const Floats inverse = broadcast(1.0f / __builtin_sqrtf(mean + epsilon));
  if (weight)
    map_rows(x, weight, size, out, [inverse](Floats a, Floats b) { return a * inverse * b; });
  else
    map_row(x, size, out, [inverse](Floats a) { return a * inverse; });
}

// ---- layer norm

// The sum of function(vector) over a row, in the order of sum_of_squares; lanes past the end count
// as 0 after it.
template <class Function>
INLINE float sum_of_row(const float* x, int size, Function function) {
  Floats sums[4] = {broadcast(0.0f), broadcast(0.0f), broadcast(0.0f), broadcast(0.0f)};
  for (int i = 0, k = 0; i < size; i += 16, k = (k + 1) % 4) {
    const int count = lanes_left(size, i);
    Floats values = function(count == 16 ? load(x + i) : load_first(x + i, count));
    if (count < 16) values = first_lanes(values, broadcast(0.0f), count);
    sums[k] = sums[k] + values;
  }
  return sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

void layer_norm(const float* x, const float* weight, const float* bias, int size, float epsilon,
                float* out) {
  const auto count = static_cast<float>(size);
  const Floats mean = broadcast(sum_of_row(x, size, [](Floats a) { return a; }) / count);
  const float variance =
      sum_of_row(x, size, [mean](Floats a) { return (a - mean) * (a - mean); }) / count;
  const Floats inverse = broadcast(1.0f / __builtin_sqrtf(variance + epsilon));
  map_row(x, size, out, [=](Floats a) { return (a - mean) * inverse; });
  if (weight) map_rows(out, weight, size, out, [](Floats a, Floats b) { return a * b; });
  if (bias) map_rows(out, bias, size, out, [](Floats a, Floats b) { return a + b; });
}

// ---- quantised activations

// Non-negative floats order as their bits do, and NaN comes after infinity: an integer maximum
// finds the largest magnitude and every value that is not finite.
INLINE Ints magnitude_bits(Floats x) { return bits_as_ints(absolute(x)); }

struct ByteScale {
  float scale;    // of a code; NaN where a value is not finite
  float inverse;  // of the scale; 0 where all codes are 0
};

INLINE ByteScale byte_scale(int32_t largest_bits) {
  constexpr int32_t infinity = 0x7f800000;
  constexpr float smallest = 1e-36f;  // below it the inverse would not be finite
  if (largest_bits >= infinity) return {float_of_bits(0x7fc00000u), 0.0f};
  const float largest = float_of_bits(static_cast<uint32_t>(largest_bits));
  return {largest / 127.0f, largest < smallest ? 0.0f : 127.0f / largest};
}

// Codes of sixteen values. Where the inverse is 0 they are 0, also for NaN.
INLINE Ints byte_codes(Floats x, float inverse) {
  if (inverse == 0.0f) return broadcast_int(0);
  return to_ints(x * broadcast(inverse));
}

// Writes a group of codes, whose values are scale * code, with its sums.
#if defined(QUIRE_UNIT_AVX512) || defined(QUIRE_UNIT_AVX2)
INLINE void store_group(Ints low, Ints high, float scale, ActivationGroup* out) {
  const __m256i codes =
      _mm256_inserti128_si256(_mm256_castsi128_si256(bytes_of(low)), bytes_of(high), 1);
  _mm256_store_si256(reinterpret_cast<__m256i*>(out->codes), codes);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes);
  __m256i sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0x4E));
  sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0xB1));
  const __m256i second = sums;  // of the codes of each half
  sums = _mm256_add_epi32(sums, _mm256_permute2x128_si256(sums, sums, 1));
  sums = _mm256_blend_epi32(sums, second, 1 << 4);
  const __m256 scales = _mm256_set1_ps(scale), ones = _mm256_set1_ps(1.0f);
  __m256 factors = _mm256_blend_ps(_mm256_setzero_ps(), ones, 1 << 1 | 1 << 4);
  factors = _mm256_blend_ps(factors, scales, 1 << 2);
  const __m256 fields = _mm256_mul_ps(_mm256_cvtepi32_ps(sums), factors);
  _mm256_store_ps(&out->scale, _mm256_blend_ps(fields, scales, 1));
}
#else
INLINE void store_group(Ints low, Ints high, float scale, ActivationGroup* out) {
  store_bytes(out->codes, low);
  store_bytes(out->codes + 16, high);
  out->scale = scale;
  out->sum = static_cast<float>(sum_of_lanes(low) + sum_of_lanes(high));
  out->scaled_sum = scale * out->sum;
  out->row_sum = 0.0f;
  out->second_sum = static_cast<float>(sum_of_lanes(high));
  for (float& nothing : out->unused) nothing = 0.0f;
}
#endif

INLINE void quantise_group(const float* x, float inverse, float scale, ActivationGroup* out) {
  store_group(byte_codes(load(x), inverse), byte_codes(load(x + 16), inverse), scale, out);
}

void quantise_groups(const float* x, int size, ActivationGroup* out) {
  for (int i = 0; i < size; i += group_size, out++) {
    const Ints largest = max(magnitude_bits(load(x + i)), magnitude_bits(load(x + i + 16)));
    const ByteScale bytes = byte_scale(max_of_lanes(largest));
    quantise_group(x + i, bytes.inverse, bytes.scale, out);
  }
}

INLINE int32_t largest_magnitude(const float* x, int size) {
  Ints largest = broadcast_int(0);
  for (int i = 0; i < size; i += 16) {
    const int count = lanes_left(size, i);
    largest = max(largest, magnitude_bits(count == 16 ? load(x + i) : load_first(x + i, count)));
  }
  return max_of_lanes(largest);
}

void quantise_blocks(const float* x, int size, ActivationBlock* out) {
  for (; size > 0; size -= activation_block_size, x += activation_block_size, out++) {
    const ByteScale bytes = byte_scale(largest_magnitude(x, activation_block_size));
    for (int i = 0; i < activation_block_size; i += 16) {
      const Ints codes = byte_codes(load(x + i), bytes.inverse);
      store_bytes(out->codes + i, codes);
      out->half_sums[i / 16] = static_cast<int16_t>(sum_of_lanes(codes));
    }
    for (int i = 0; i < activation_block_size / 32; i++)
      out->sums[i] = static_cast<int16_t>(out->half_sums[2 * i] + out->half_sums[2 * i + 1]);
    out->scale = bytes.scale;
    for (float& nothing : out->unused) nothing = 0.0f;
  }
}

// As BitNet models are trained: no scale is that of a smaller maximum than 1e-5, and of two nearest
// codes the one further from zero is taken, as the reference does.
INLINE ByteScale per_token_scale(int32_t largest_bits) {
  constexpr float smallest = 1e-5f;
  const auto smallest_bits = static_cast<int32_t>(bits_of_float(smallest));
  if (largest_bits >= smallest_bits) return byte_scale(largest_bits);
  return {smallest / 127.0f, 127.0f / smallest};
}

float quantise_per_token(const float* x, int size, ActivationGroup* out) {
  const ByteScale bytes = per_token_scale(largest_magnitude(x, size));
  const Floats inverse = broadcast(bytes.inverse), zero = broadcast(0.0f);
  const bool is_finite = bytes.inverse != 0.0f;
  const auto codes = [&](const float* from) {
    return to_ints_half_away(is_finite ? load(from) * inverse : zero);
  };
  float row_sum = 0.0f;
  for (int i = 0; i < size; i += group_size) {
    ActivationGroup* group = out + i / group_size;
    store_group(codes(x + i), codes(x + i + 16), 1.0f, group);
    row_sum += group->sum;  // an integer below 2^24
  }
  out->row_sum = row_sum;
  return bytes.scale;
}

// ---- addition, soft cap

void add_rows(float* x, const float* y, int size) {
  map_rows(x, y, size, x, [](Floats a, Floats b) { return a + b; });
}

void add_scaled_rows(float* x, const float* y, float factor, int size) {
  const Floats factors = broadcast(factor);
  map_rows(x, y, size, x, [=](Floats a, Floats b) { return a + b * factors; });
}

// e^x - 1 for x from -87.3 to 88.3, which near 0 is a polynomial without a constant term, so that
// small x keep their precision.
INLINE Floats exponential_less_one(Floats x) {
  const Ints exponent = to_ints(x * broadcast(1.44269504088896341f));
  const Floats n = to_floats(exponent);
  Floats r = fma(n, broadcast(-0.693145751953125f), x);
  r = fma(n, broadcast(-1.42860682030941723212e-6f), r);
  Floats p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r);  // e^r - 1
  const Floats power = bits_as_floats(shift_left_23(exponent + broadcast_int(127)));
  return fma(power, p, power - broadcast(1.0f));
}

// tanh(x) = m / (m + 2) with m = e^2x - 1. Beyond 10 it is 1 in single precision.
INLINE Floats hyperbolic_tangent(Floats x) {
  const Floats two = broadcast(2.0f);
  x = max(broadcast(-10.0f), min(broadcast(10.0f), x)) * two;
  const Floats less_one = exponential_less_one(x);
  return less_one / (less_one + two);
}

void soft_cap(float* x, int64_t size, float cap) {
  const Floats limit = broadcast(cap), inverse = broadcast(1.0f / cap);
  map_row(x, size, x, [=](Floats a) { return limit * hyperbolic_tangent(a * inverse); });
}

// ---- gates

INLINE Floats silu(Floats x) { return x / (broadcast(1.0f) + exponential(broadcast(0.0f) - x)); }

INLINE Floats relu2(Floats x) {
  const Floats positive = max(broadcast(0.0f), x);  // in this order NaN stays NaN
  return positive * positive;
}

// x (1 + tanh(z)) / 2 is x / (1 + e^-2z), which keeps its precision where tanh is near -1.
INLINE Floats gelu_tanh(Floats x) {
  const Floats z = fma(x * x * x, broadcast(0.044715f), x) * broadcast(0.7978845608028654f);
  return x / (broadcast(1.0f) + exponential(z * broadcast(-2.0f)));
}

// The complement of the error function for x >= 0, to 1.2e-7 of its value (the Chebyshev fit of
// Press et al., Numerical Recipes): t * e^(-x^2 + p(t)) with t = 1 / (1 + x / 2).
INLINE Floats error_complement(Floats x) {
  const Floats t = broadcast(1.0f) / fma(x, broadcast(0.5f), broadcast(1.0f));
  Floats p = broadcast(0.17087277f);
  p = fma(p, t, broadcast(-0.82215223f));
  p = fma(p, t, broadcast(1.48851587f));
  p = fma(p, t, broadcast(-1.13520398f));
  p = fma(p, t, broadcast(0.27886807f));
  p = fma(p, t, broadcast(-0.18628806f));
  p = fma(p, t, broadcast(0.09678418f));
  p = fma(p, t, broadcast(0.37409196f));
  p = fma(p, t, broadcast(1.00002368f));
  p = fma(p, t, broadcast(-1.26551223f));
  return t * exponential(p - x * x);
}

// x times the normal distribution's share below x: max(x, 0) less half of |x| erfc(|x| / sqrt(2)).
INLINE Floats gelu(Floats x) {
  const Floats size = absolute(x);
  const Floats tail = error_complement(size * broadcast(0.7071067811865476f));
  return max(broadcast(0.0f), x) - broadcast(0.5f) * size * tail;
}

// gpt-oss: both are clamped, the sigmoid has a slope, the value gets 1 added. In these orders of
// operands NaN stays NaN.
INLINE Floats clamped_swiglu(Floats gate, Floats up) {
  const Floats limit = broadcast(7.0f), one = broadcast(1.0f), zero = broadcast(0.0f);
  gate = min(limit, gate);
  up = max(zero - limit, min(limit, up));
  return gate / (one + exponential(zero - gate * broadcast(1.702f))) * (up + one);
}

// Apertus: beta x, plus alpha x^2 where x is positive, else alpha (e^min(x, epsilon) - 1 - x) with
// an alpha of its own. In these orders of operands NaN stays NaN.
INLINE Floats xielu(const float* numbers, Floats x) {
  const Floats zero = broadcast(0.0f), positive = max(zero, x), other = min(zero, x);
  const Floats power = max(broadcast(-87.3f), min(broadcast(numbers[3]), other));
  const Floats is_other =  // 1 or 0: the sign of -x
      broadcast(1.0f) + to_floats(shift_right(bits_as_ints(zero - x), 31));
  const Floats below = is_other * (exponential_less_one(power) - other);
  return (broadcast(numbers[0]) * positive * positive + below * broadcast(numbers[1])) +
         broadcast(numbers[2]) * x;
}

template <class Function>
INLINE void gate_rows(const float* gate, const float* up, int size, float* out, Function function) {
  if (up)
    map_rows(gate, up, size, out, [=](Floats g, Floats u) { return function(g) * u; });
  else
    map_row(gate, size, out, function);
}

void apply_gate(Gate kind, const float* numbers, const float* gate, const float* up, int size,
                float* out) {
  switch (kind) {
    case Gate::silu: return gate_rows(gate, up, size, out, [](Floats x) { return silu(x); });
    case Gate::gelu: return gate_rows(gate, up, size, out, [](Floats x) { return gelu(x); });
    case Gate::gelu_tanh:
      return gate_rows(gate, up, size, out, [](Floats x) { return gelu_tanh(x); });
    case Gate::relu2: return gate_rows(gate, up, size, out, [](Floats x) { return relu2(x); });
    case Gate::clamped_swiglu:
      return map_rows(gate, up, size, out, [](Floats g, Floats u) { return clamped_swiglu(g, u); });
    case Gate::xielu: return map_row(gate, size, out, [=](Floats x) { return xielu(numbers, x); });
  }
}

// ---- rope

// Products are rounded before they are added, as in the reference: no fma.
INLINE void rotate_pair(float* first, float* second, float cosine, float sine) {
  const float a = *first, b = *second;
  *first = a * cosine - b * sine;
  *second = a * sine + b * cosine;
}

void apply_rope(float* heads, int num_heads, int head_dim, const Rope& rope, int position) {
  const int half = rope.dims / 2;
  const float* __restrict cosines = rope.cosines + static_cast<int64_t>(position) * half;
  const float* __restrict sines = rope.sines + static_cast<int64_t>(position) * half;
  for (int head = 0; head < num_heads; head++) {
    float* __restrict x = heads + static_cast<int64_t>(head) * head_dim;
    if (rope.interleaved) {
      for (int i = 0; i < half; i++) rotate_pair(x + 2 * i, x + 2 * i + 1, cosines[i], sines[i]);
    } else {
      for (int i = 0; i < half; i++) rotate_pair(x + i, x + half + i, cosines[i], sines[i]);
    }
  }
}
