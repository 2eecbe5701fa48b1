// Bindings that run the kernels of a named unit on arrays, one function at a time: for tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "bindings.h"
#include "kernels.h"
#include "memory.h"
#include "routing.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

template <class Value>
using Array = nb::ndarray<Value, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Input = Array<const float>;
using Output = Array<float>;
using Table = Array<const int32_t>;
using Records = Array<uint8_t>;  // the bytes of ActivationGroups or ActivationBlocks

std::vector<const Kernels*> units() {
  std::vector<const Kernels*> found{&portable_kernels()};
  for (const Kernels* unit : {avx2_kernels(), avx512_kernels(), amx_kernels()})
    if (unit) found.push_back(unit);
  return found;
}

int size_of(size_t size) {
  expect_within("the size of an array", static_cast<int64_t>(size), 0, int64_t{1} << 30);
  return static_cast<int>(size);
}

void expect_blocks(const Input& x, const Records& out) {
  expect(x.size() % activation_block_size == 0, "x must hold whole blocks");
  expect(out.size() == x.size() / activation_block_size * sizeof(ActivationBlock),
         "out: 320 bytes a block");
}

void expect_groups(const Input& x, const Records& out) {
  expect(x.size() % group_size == 0, "x must hold whole groups");
  expect(out.size() == x.size() / group_size * sizeof(ActivationGroup), "out: 64 bytes a group");
}

// A copy at whole cache lines, where arrays need not be.
std::vector<ActivationGroup> aligned_groups(const Records& out) {
  return std::vector<ActivationGroup>(out.size() / sizeof(ActivationGroup));
}

void copy_groups(const std::vector<ActivationGroup>& groups, const Records& out) {
  std::memcpy(out.data(), groups.data(), out.size());
}

// The KV cache of one layer, with the block table of one sequence.
class Cache {
 public:
  Cache(const std::string& unit, const AttentionShape& shape, bool is_int8, Table block_table,
        std::vector<float> sinks, std::vector<float> slopes)
      : kernels_(unit_named(unit)),
        shape_(shape),
        sinks_(std::move(sinks)),
        slopes_(std::move(slopes)) {
    expect_within("num_heads", shape.num_heads, 1, max_heads);
    expect_within("num_kv_heads", shape.num_kv_heads, 1, max_heads);
    expect_within("head_dim", shape.head_dim, 1, max_head_dim);
    expect_within("value_dim", shape.value_dim, 1, max_head_dim);
    expect_within("window", shape.window, 0, max_positions);
    expect(shape.num_heads % shape.num_kv_heads == 0,
           "num_heads must be a multiple of num_kv_heads");
    expect(sinks_.empty() || sinks_.size() == static_cast<size_t>(shape.num_heads),
           "a sink must be given for each head");
    if (!sinks_.empty()) shape_.sinks = sinks_.data();
    expect(slopes_.empty() || slopes_.size() == static_cast<size_t>(shape.num_heads),
           "a slope must be given for each head");
    if (!slopes_.empty()) shape_.slopes = slopes_.data();
    expect(!shape.has_values_in_keys || shape.value_dim <= shape.head_dim,
           "values in keys must not be longer than keys");
    workspace_ = Buffer(
        bytes_of(attention_workspace(shape.head_dim, shape.value_dim, shape.has_values_in_keys),
                 sizeof(float)));
    table_.assign(block_table.data(), block_table.data() + block_table.size());
    int32_t num_blocks = 0;
    for (int32_t block : table_) {
      expect_within("a block", block, 0, max_blocks - 1);
      num_blocks = block >= num_blocks ? block + 1 : num_blocks;
    }
    const int64_t stored = shape.head_dim + (shape.has_values_in_keys ? 0 : shape.value_dim);
    const int64_t values = checked_product(shape.num_kv_heads, stored, block_size);
    const int64_t block_bytes = is_int8 ? values : 2 * values;
    // No result may depend on slots that were not written: all begin as NaN, in bytes as -1.
    data_.assign(static_cast<size_t>(checked_product(num_blocks, block_bytes)), 0xff);
    const auto num_scales = static_cast<size_t>(
        is_int8 ? checked_product(num_blocks, shape.num_kv_heads, block_size) : 0);
    key_scales_.assign(num_scales, __builtin_nanf(""));
    value_scales_.assign(num_scales, __builtin_nanf(""));
    layer_ = {data_.data(), block_bytes, is_int8 ? key_scales_.data() : nullptr,
              is_int8 ? value_scales_.data() : nullptr, is_int8};
  }

  void store(int position, Input key, Input value) {
    const auto heads = static_cast<size_t>(shape_.num_kv_heads);
    const int value_dim = shape_.has_values_in_keys ? 0 : shape_.value_dim;
    expect(key.size() == heads * shape_.head_dim && value.size() == heads * value_dim,
           "key and value: one row of all kv heads");
    expect_positions(position, 1);
    kernels_.store_key_value(layer_, shape_, {position, table_.data()}, key.data(), value.data());
  }

  // Rows of all heads, at consecutive positions.
  void attend(int position, int num_rows, Input queries, Output out) {
    expect_rows(num_rows, queries, out);
    expect_positions(position, num_rows);
    std::vector<RowPosition> rows;
    for (int i = 0; i < num_rows; i++) rows.push_back({position + i, table_.data()});
    for (int head = 0; head < shape_.num_kv_heads; head++)
      kernels_.attend(layer_, shape_, head, rows.data(), num_rows, queries.data(), out.data(),
                      strides(), workspace_.as<float>());
  }

  // One row split by tiles, each with its own call, the last first.
  void attend_split(int position, Input queries, Output out) {
    expect_rows(1, queries, out);
    expect_positions(position, 1);
    const RowPosition row{position, table_.data()};
    int start = 0;
    if (shape_.window > 0)
      start = shape_.is_chunked ? position / shape_.window * shape_.window
                                : position - shape_.window + 1;
    const int first = (start > 0 ? start : 0) / kv_tile_size;
    const int num_tiles = position / kv_tile_size + 1 - first;
    const int64_t tile_floats =
        int64_t{shape_.num_heads / shape_.num_kv_heads} * (shape_.value_dim + 2);
    std::vector<float> partials(static_cast<size_t>(checked_product(tile_floats, num_tiles)));
    for (int head = 0; head < shape_.num_kv_heads; head++) {
      for (int tile = num_tiles - 1; tile >= 0; tile--)
        kernels_.attend_split(layer_, shape_, head, row, first + tile, 1, queries.data(),
                              partials.data() + tile * tile_floats, workspace_.as<float>());
      kernels_.merge_splits(shape_, head, num_tiles, partials.data(), out.data());
    }
  }

  nb::bytes contents() const {
    std::string all(data_.begin(), data_.end());
    for (const std::vector<float>* scales : {&key_scales_, &value_scales_})
      all.append(reinterpret_cast<const char*>(scales->data()), scales->size() * sizeof(float));
    return nb::bytes(all.data(), all.size());
  }

 private:
  RowStrides strides() const {
    return {int64_t{shape_.num_heads} * shape_.head_dim,
            int64_t{shape_.num_heads} * shape_.value_dim};
  }

  void expect_rows(int num_rows, const Input& queries, const Output& out) const {
    expect(static_cast<int64_t>(queries.size()) == num_rows * strides().queries &&
               static_cast<int64_t>(out.size()) == num_rows * strides().out,
           "queries and out: rows of all heads");
  }

  void expect_positions(int first, int count) const {
    expect(first >= 0 && count > 0 && size_t(first) + size_t(count) <= table_.size() * block_size,
           "positions must lie in the blocks of the table");
  }

  const Kernels& kernels_;
  AttentionShape shape_;
  std::vector<float> sinks_, slopes_;
  std::vector<int32_t> table_;
  std::vector<uint8_t> data_;
  std::vector<float> key_scales_, value_scales_;
  LayerCache layer_;
  Buffer workspace_;
};

// ---- kernels of one row

void rms_norm(const std::string& unit, Input x, Input weight, float epsilon, Output out) {
  expect(x.size() == weight.size() && x.size() == out.size(), "x, weight, out: one size");
  unit_named(unit).rms_norm(x.data(), weight.data(), size_of(x.size()), epsilon, out.data());
}

void layer_norm(const std::string& unit, Input x, std::optional<Input> weight,
                std::optional<Input> bias, float epsilon, Output out) {
  const auto values = [&](const std::optional<Input>& of) {
    expect(!of || of->size() == x.size(), "x, weight, bias: one size");
    return of ? of->data() : nullptr;
  };
  expect(x.size() == out.size(), "x, out: one size");
  unit_named(unit).layer_norm(x.data(), values(weight), values(bias), size_of(x.size()), epsilon,
                              out.data());
}

void quantise_groups(const std::string& unit, Input x, Records out) {
  expect_groups(x, out);
  std::vector<ActivationGroup> groups = aligned_groups(out);
  unit_named(unit).quantise_groups(x.data(), size_of(x.size()), groups.data());
  copy_groups(groups, out);
}

void quantise_blocks(const std::string& unit, Input x, Records out) {
  expect_blocks(x, out);
  std::vector<ActivationBlock> blocks(x.size() / activation_block_size);
  unit_named(unit).quantise_blocks(x.data(), size_of(x.size()), blocks.data());
  std::memcpy(out.data(), blocks.data(), out.size());
}

float quantise_per_token(const std::string& unit, Input x, Records out) {
  expect_groups(x, out);
  std::vector<ActivationGroup> groups = aligned_groups(out);
  const float scale =
      unit_named(unit).quantise_per_token(x.data(), size_of(x.size()), groups.data());
  copy_groups(groups, out);
  return scale;
}

void gate(const std::string& unit, const std::string& kind, Input gate, Input up, Output out) {
  expect(gate.size() == up.size() && gate.size() == out.size(), "gate, up, out: one size");
  const Gate named = gate_named(kind);
  expect(named != Gate::xielu, "xielu has numbers and no gate");
  unit_named(unit).gate(named, nullptr, gate.data(), up.data(), size_of(gate.size()), out.data());
}

void xielu(const std::string& unit, Input x, Input numbers, Output out) {
  expect(x.size() == out.size(), "x, out: one size");
  expect(numbers.size() == num_xielu_numbers, "xielu has four numbers");
  unit_named(unit).gate(Gate::xielu, numbers.data(), x.data(), nullptr, size_of(x.size()),
                        out.data());
}

void add(const std::string& unit, Output x, Input y) {
  expect(x.size() == y.size(), "x, y: one size");
  unit_named(unit).add(x.data(), y.data(), size_of(x.size()));
}

void soft_cap(const std::string& unit, Output x, float cap) {
  unit_named(unit).soft_cap(x.data(), int64_t(x.size()), cap);
}

void rope(const std::string& unit, Output heads, int head_dim, bool interleaved, Input cosines,
          Input sines) {
  expect_within("head_dim", head_dim, 1, max_head_dim);
  expect(cosines.size() <= size_t(head_dim) / 2, "at most head_dim / 2 angles");
  expect(sines.size() == cosines.size(), "as many sines as cosines");
  const int dims = 2 * size_of(cosines.size());
  expect(heads.size() % head_dim == 0, "whole heads");
  const Rope rope{dims, interleaved, cosines.data(), sines.data()};
  unit_named(unit).rope(heads.data(), size_of(heads.size()) / head_dim, head_dim, rope, 0);
}

void add_scaled(const std::string& unit, Output x, Input y, float factor) {
  expect(x.size() == y.size(), "x, y: one size");
  unit_named(unit).add_scaled(x.data(), y.data(), factor, size_of(x.size()));
}

// The experts of one token, and their weights.
std::pair<std::vector<int>, std::vector<float>> choose_experts(
    Input logits, Input choice_bias, Input factors, int num_used, const std::string& scoring,
    bool normalises, float scale, int num_groups, int num_used_groups, int num_group_best) {
  const Routing routing{
      size_of(logits.size()), num_used,      scoring_named(scoring), normalises, scale, num_groups,
      num_used_groups,        num_group_best};
  checked(routing);
  for (const Input& given : {choice_bias, factors})
    expect(given.size() == 0 || given.size() == logits.size(), "a number for each expert, or none");
  const auto data = [](const Input& given) { return given.size() ? given.data() : nullptr; };
  RoutingScratch scratch;
  std::vector<int> chosen(static_cast<size_t>(num_used));
  std::vector<float> weights(chosen.size());
  quire::choose_experts(routing, logits.data(), data(choice_bias), data(factors), scratch,
                        chosen.data(), weights.data());
  return {chosen, weights};
}

void bind_routing(nb::module_& m) {
  m.def("choose_experts", &choose_experts, nb::kw_only(), "logits"_a, "choice_bias"_a, "factors"_a,
        "num_used"_a, "scoring"_a, "normalises"_a, "scale"_a, "num_groups"_a, "num_used_groups"_a,
        "num_group_best"_a);
}

void bind_rows(nb::module_& m) {
  m.def("rms_norm", &rms_norm, "unit"_a, "x"_a, "weight"_a, "epsilon"_a, "out"_a);
  m.def("layer_norm", &layer_norm, "unit"_a, "x"_a, "weight"_a.none(), "bias"_a.none(), "epsilon"_a,
        "out"_a);
  m.def("quantise_groups", &quantise_groups, "unit"_a, "x"_a, "out"_a);
  m.def("quantise_blocks", &quantise_blocks, "unit"_a, "x"_a, "out"_a);
  m.def("quantise_per_token", &quantise_per_token, "unit"_a, "x"_a, "out"_a);
  m.def("gate", &gate, "unit"_a, "kind"_a, "gate"_a, "up"_a, "out"_a);
  m.def("xielu", &xielu, "unit"_a, "x"_a, "numbers"_a, "out"_a);
  m.def("add", &add, "unit"_a, "x"_a, "y"_a);
  m.def("add_scaled", &add_scaled, "unit"_a, "x"_a, "y"_a, "factor"_a);
  m.def("soft_cap", &soft_cap, "unit"_a, "x"_a, "cap"_a);
  m.def("rope", &rope, "unit"_a, "heads"_a, "head_dim"_a, "interleaved"_a, "cosines"_a, "sines"_a);
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("units", [] {
    std::vector<std::string> names;
    for (const Kernels* unit : units()) names.push_back(unit->name);
    return names;
  });
  bind_rows(m);
  bind_routing(m);
  nb::class_<Cache>(m, "Cache")
      .def(
          "__init__",
          [](Cache* self, const std::string& unit, int num_heads, int num_kv_heads, int head_dim,
             Table block_table, int value_dim, int window, bool is_chunked, float scale,
             float soft_cap, std::vector<float> sinks, bool has_values_in_keys, bool is_int8,
             std::vector<float> slopes) {
            AttentionShape shape{};
            shape.num_heads = num_heads;
            shape.num_kv_heads = num_kv_heads;
            shape.head_dim = head_dim;
            shape.value_dim = value_dim > 0 ? value_dim : head_dim;
            shape.window = window;
            shape.is_chunked = is_chunked;
            shape.scale = scale;
            shape.soft_cap = soft_cap;
            shape.has_values_in_keys = has_values_in_keys;
            new (self)
                Cache(unit, shape, is_int8, block_table, std::move(sinks), std::move(slopes));
          },
          nb::arg("unit"), nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
          nb::arg("block_table"), nb::arg("value_dim") = 0, nb::arg("window") = 0,
          nb::arg("is_chunked") = false, nb::arg("scale") = 1.0f, nb::arg("soft_cap") = 0.0f,
          nb::arg("sinks") = std::vector<float>(), nb::arg("has_values_in_keys") = false,
          nb::arg("is_int8") = false, nb::arg("slopes") = std::vector<float>())
      .def("store", &Cache::store, "position"_a, "key"_a, "value"_a)
      .def("attend", &Cache::attend, "position"_a, "num_rows"_a, "queries"_a, "out"_a)
      .def("attend_split", &Cache::attend_split, "position"_a, "queries"_a, "out"_a)
      .def("contents", &Cache::contents);
}

}  // namespace quire
