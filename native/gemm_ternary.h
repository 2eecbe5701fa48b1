// GEMM of ternary codes whose scales are all 1: a row's sum is one integer, exact in any order.
//
// The four codes of a byte are decoded in registers: for four tokens at a time that costs little
// beside the products. For few tokens a code stays at its bits of the byte where the unit's sums
// have room for it (max_tokens_apart): its products are then multiples of 4^field, in a sum of
// their own that is shifted at the end.

constexpr int ternary_fields = 4;  // codes of a byte

template <int panels, int tokens, bool apart>
struct TernarySums {
  static constexpr int sums = apart ? ternary_fields : 1;
  TernaryDot of[panels][tokens][sums];
  INLINE_METHOD void clear() {
    for (auto& panel : of)
      for (auto& token : panel)
        for (auto& dot : token) dot.clear();
  }
  INLINE_METHOD void widen() {
    UNROLL(2)
    for (int g = 0; g < panels; g++) UNROLL(4)
    for (int t = 0; t < tokens; t++)
      for (auto& dot : of[g][t]) dot.widen();
  }
  INLINE_METHOD Ints total(int g, int t) const {
    Ints total = of[g][t][0].total();
    for (int field = 1; field < sums; field++)
      total = total + shift_right(of[g][t][field].total(), 2 * field);
    return total;
  }
};

// One of the two stored vectors of a sub-block (formats.h) times some tokens' activations.
template <int panels, int tokens, bool apart>
INLINE void add_ternary(const Codes* packed, const ActivationGroup* const* activations, int s,
                        int vector, TernarySums<panels, tokens, apart>& sums) {
  UNROLL(4)
  for (int field = 0; field < ternary_fields; field++) {
    Codes codes[panels];
    UNROLL(2)
    for (int g = 0; g < panels; g++)
      codes[g] = apart ? packed[g] & static_cast<uint8_t>(3 << 2 * field)
                       : shifted(packed[g], 2 * field) & 3;
    UNROLL(4)
    for (int t = 0; t < tokens; t++) {
      UNROLL(2)
      for (int g = 0; g < panels; g++)
        sums.of[g][t][apart ? field : 0].add(codes[g],
                                             activations[t][s].codes + 4 * (2 * field + vector));
    }
  }
}

template <int panels, int tokens>
void ternary_tokens(const Gemm& p, const PackedSource<AsTernary, panels>& source, int first_row,
                    int token) {
  const ActivationGroup* activations[tokens];
  for (int t = 0; t < tokens; t++)
    activations[t] =
        static_cast<const ActivationGroup*>(p.activations) + (token + t) * p.activation_stride;
  TernarySums<panels, tokens, tokens <= max_tokens_apart> sums;
  sums.clear();
  const int sub_blocks = static_cast<int>(p.in_size / group_size);
  for (int s = 0; s < sub_blocks; s++) {
    source.prefetch_next(s);
    UNROLL(2)
    for (int vector = 0; vector < 2; vector++) {
      Codes packed[panels];
      for (int g = 0; g < panels; g++)
        packed[g] =
            load_codes(source.codes_of[g] + int64_t{s} * AsTernary::info.code_bytes + 64 * vector);
      add_ternary(packed, activations, s, vector, sums);
    }
    if (s % slab == slab - 1) sums.widen();
  }
  sums.widen();
  for (int g = 0; g < panels; g++)
    for (int t = 0; t < tokens; t++) {
      const Ints zeros = broadcast_int(static_cast<int32_t>(activations[t]->row_sum));
      store_rows(p.out + (token + t) * p.out_stride + first_row + g * panel_rows,
                 to_floats(sums.total(g, t) - zeros), p.num_rows - first_row - g * panel_rows);
    }
}

template <int panels>
void ternary_panels(const Gemm& p, int panel) {
  PackedSource<AsTernary, panels> source = packed_source<AsTernary, panels>(p, panel);
  const int row = panel * panel_rows;
  source.num_passes = (p.num_tokens + 3) / 4;
  for (int t = 0; t < p.num_tokens; t += 4, source.pass++) switch (p.num_tokens - t) {
      case 1: ternary_tokens<panels, 1>(p, source, row, t); break;
      case 2: ternary_tokens<panels, 2>(p, source, row, t); break;
      case 3: ternary_tokens<panels, 3>(p, source, row, t); break;
      default: ternary_tokens<panels, 4>(p, source, row, t);
    }
}

void gemm_ternary(const Gemm& p) {
  int panel = 0;
  if constexpr (panels_at_once > 1)
    for (; panel + panels_at_once <= p.num_panels; panel += panels_at_once)
      ternary_panels<panels_at_once>(p, panel);
  for (; panel < p.num_panels; panel++) ternary_panels<1>(p, panel);
}
