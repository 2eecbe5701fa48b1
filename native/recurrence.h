// Kernels of layers that keep a state: a convolution over the last tokens, a head's recurrence, and
// gates on what heads leave.

// out[i] = sum over t of taps[t][i] * inputs[t][i], the last token's last, plus the bias; then silu
// if asked. `out` may be one of the inputs.
void convolve(const float* const* inputs, const float* taps, int64_t tap_stride, int kernel,
              const float* bias, bool has_silu, int size, float* out) {
  for (int i = 0; i < size; i += 16) {
    const int count = lanes_left(size, i);
    const auto at = [&](const float* p) {
      return count == 16 ? load(p + i) : load_first(p + i, count);
    };
    Floats total = broadcast(0.0f);
    for (int t = 0; t < kernel; t++) total = fma(at(taps + t * tap_stride), at(inputs[t]), total);
    if (bias) total = total + at(bias);
    if (has_silu) total = silu(total);
    if (count == 16)
      store(out + i, total);
    else
      store_first(out + i, total, count);
  }
}

// x[i] * sigmoid(gate[i])
void multiply_sigmoid(float* x, const float* gate, int size) {
  map_rows(x, gate, size, x, [](Floats a, Floats g) {
    return a / (broadcast(1.0f) + exponential(broadcast(0.0f) - g));
  });
}

// x / |x|, times the factor.
void make_unit(const float* x, int size, float epsilon, float factor, float* out) {
  const Floats scale = broadcast(factor / __builtin_sqrtf(sum_of_squares(x, size) + epsilon));
  map_row(x, size, out, [scale](Floats a) { return a * scale; });
}

// `width` vectors of a head's values, in registers. Sums run over keys in their order, a lane for
// each value, so that all units give the same bits.
template <int width, bool streams>
INLINE void recur_values(const Recurrence& r, int64_t first) {
  const Floats decay = broadcast(r.decay), step = broadcast(r.step);
  Floats update[width], total[width];
  UNROLL(4)
  for (int j = 0; j < width; j++) {
    update[j] = load(r.value + first + 16 * j);
    total[j] = broadcast(0.0f);
  }
  if (r.is_delta) {
    for (int k = 0; k < r.key_dim; k++) {
      const Floats key = broadcast(r.key[k]);
      const float* from = r.from + k * r.stride + first;
      UNROLL(4)
      for (int j = 0; j < width; j++) total[j] = fma(key, load(from + 16 * j) * decay, total[j]);
    }
    UNROLL(4)
    for (int j = 0; j < width; j++) {
      update[j] = update[j] - total[j];
      total[j] = broadcast(0.0f);
    }
  }
  UNROLL(4)
  for (int j = 0; j < width; j++) update[j] = update[j] * step;
  for (int k = 0; k < r.key_dim; k++) {
    const Floats key = broadcast(r.key[k]), query = broadcast(r.query[k]);
    const float* from = r.from + k * r.stride + first;
    float* to = r.to + k * r.stride + first;
    UNROLL(4)
    for (int j = 0; j < width; j++) {
      const Floats state = fma(key, update[j], load(from + 16 * j) * decay);
      if (streams)
        stream(to + 16 * j, state);
      else
        store(to + 16 * j, state);
      total[j] = fma(query, state, total[j]);
    }
  }
  UNROLL(4)
  for (int j = 0; j < width; j++) store(r.out + first + 16 * j, total[j]);
}

template <bool streams>
INLINE void recur_all(const Recurrence& r) {
  int64_t first = 0;
  for (; first + 64 <= r.stride; first += 64) recur_values<4, streams>(r, first);
  for (; first < r.stride; first += 16) recur_values<1, streams>(r, first);
}

void recur(const Recurrence& r) {
  if (!r.streams) return recur_all<false>(r);
  recur_all<true>(r);
  stream_fence();
}

// state[k][i] = exp(a[k][i] * step[i]) * state[k][i] + key[k] * step[i] * value[i], and out[i] =
// the sum over k of query[k] * state[k][i], plus d[i] * value[i]. A lane for each value, keys in
// their order.
void recur_each(const EachRecurrence& r) {
  for (int i = 0; i < r.size; i += 16) {
    const int count = lanes_left(r.size, i);
    const auto at = [&](const float* p) {
      return count == 16 ? load(p + i) : load_first(p + i, count);
    };
    const Floats step = at(r.steps), value = at(r.value), update = step * value;
    Floats total = broadcast(0.0f);
    for (int k = 0; k < r.key_dim; k++) {
      const Floats decay = exponential(at(r.a + k * r.a_stride) * step);
      const Floats state =
          fma(broadcast(r.key[k]), update, load(r.from + k * r.stride + i) * decay);
      store(r.to + k * r.stride + i, state);
      total = fma(broadcast(r.query[k]), state, total);
    }
    total = fma(at(r.d), value, total);
    if (count == 16)
      store(r.out + i, total);
    else
      store_first(r.out + i, total, count);
  }
}
