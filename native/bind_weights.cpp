// Packed matrices in Python, for tests: packing, unpacking, and a named unit's GEMM.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "bindings.h"
#include "kernels.h"
#include "memory.h"
#include "pack.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Blocks = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Activations = nb::ndarray<nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

class PackedMatrix {
 public:
  PackedMatrix(const std::string& format, Blocks blocks, int64_t num_rows, int64_t in_size)
      : num_rows_(num_rows), in_size_(in_size) {
    const SourceFormat& source = source_named(format);
    expect_blocks(source, num_rows, in_size, blocks.size());
    format_ = source.packed;
    panel_bytes_ = panel_bytes_of(format_, in_size);
    data_ = Buffer(static_cast<size_t>(packed_size(source, num_rows, in_size)));
    for (int64_t panel = 0; panel < num_panels(); panel++)
      pack_panel(source, blocks.data(), in_size, num_rows, panel * panel_rows,
                 data_.data() + panel * panel_bytes_);
  }

  int64_t num_bytes() const { return static_cast<int64_t>(data_.size()); }
  bool takes_floats() const { return format_infos[format_].bits == 0; }
  bool takes_blocks() const { return quire::takes_blocks(format_); }

  void unpack(Output out) const {
    expect(static_cast<int64_t>(out.shape(0)) == num_rows_ &&
               static_cast<int64_t>(out.shape(1)) == in_size_,
           "out must have the matrix's shape");
    for (int64_t row = 0; row < num_rows_; row++)
      unpack_row(format_, data_.data() + row / panel_rows * panel_bytes_, in_size_,
                 static_cast<int>(row % panel_rows), out.data() + row * in_size_);
  }

  // activations: the bytes of ActivationGroups [token][in_size / 32] or of ActivationBlocks
  // [token][in_size / 256], or floats [token][in_size].
  void gemm(const std::string& unit, Activations activations, int num_tokens, Output out,
            std::optional<Activations> residuals, bool has_unit_scales) const {
    const int64_t token_size = takes_floats()   ? in_size_
                               : takes_blocks() ? in_size_ / activation_block_size
                                                : in_size_ / group_size;
    const size_t size = takes_floats()   ? sizeof(float)
                        : takes_blocks() ? sizeof(ActivationBlock)
                                         : sizeof(ActivationGroup);
    expect_within("num_tokens", num_tokens, 1, max_tokens);
    expect(activations.nbytes() == bytes_of(checked_product(token_size, num_tokens), size),
           "the activations have another size");
    expect(!residuals || (!takes_floats() && residuals->nbytes() == activations.nbytes()),
           "residuals are as many as the activations");
    expect(static_cast<int64_t>(out.shape(0)) == num_tokens &&
               static_cast<int64_t>(out.shape(1)) == num_rows_,
           "out must be [tokens, rows]");
    Gemm args{};
    args.format = format_;
    args.weights = data_.data();
    args.panel_bytes = panel_bytes_;
    args.in_size = in_size_;
    args.num_panels = static_cast<int>(num_panels());
    args.num_rows = static_cast<int>(num_rows_);
    args.activations = activations.data();
    args.activation_stride = token_size;
    if (residuals) args.residuals = residuals->data();
    args.has_unit_scales = has_unit_scales;
    args.num_tokens = num_tokens;
    args.out = out.data();
    args.out_stride = num_rows_;
    unit_named(unit).gemm(args);
  }

 private:
  static constexpr int max_tokens = 1 << 20;
  int64_t num_panels() const { return (num_rows_ + panel_rows - 1) / panel_rows; }

  Format format_;
  int64_t num_rows_, in_size_, panel_bytes_ = 0;
  Buffer data_;
};

}  // namespace

void bind_weights(nb::module_& m) {
  m.attr("peak_round") = 2 * 4096;  // operations in a round of peak_dots
  m.def(
      "peak_dots",
      [](const std::string& unit, int64_t rounds) {
        const Kernels& kernels = unit_named(unit);
        expect_within("rounds", rounds, 0, int64_t{1} << 40);
        nb::gil_scoped_release released;
        return kernels.peak_dots(rounds);
      },
      "unit"_a, "rounds"_a);
  nb::class_<PackedMatrix>(m, "PackedMatrix")
      .def(nb::init<const std::string&, Blocks, int64_t, int64_t>(), "format"_a, "blocks"_a,
           "num_rows"_a, "in_size"_a)
      .def("unpack", &PackedMatrix::unpack, "out"_a)
      .def("gemm", &PackedMatrix::gemm, "unit"_a, "activations"_a, "num_tokens"_a, "out"_a,
           "residuals"_a = nb::none(), "has_unit_scales"_a = false,
           nb::sig("def gemm(self, unit: str, activations: numpy.typing.NDArray[numpy.generic], "
                   "num_tokens: int, out: numpy.typing.NDArray[numpy.float32], "
                   "residuals: numpy.typing.NDArray[numpy.generic] | None = None, "
                   "has_unit_scales: bool = False) -> None"))
      .def_prop_ro("num_bytes", &PackedMatrix::num_bytes)
      .def_prop_ro("takes_floats", &PackedMatrix::takes_floats)
      .def_prop_ro("takes_blocks", &PackedMatrix::takes_blocks);
}

}  // namespace quire
