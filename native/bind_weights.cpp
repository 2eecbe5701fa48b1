// Packed matrices in Python, for tests: packing, unpacking, and products of a named unit.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "kernels.h"
#include "memory.h"
#include "pack.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Blocks = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Columns = nb::ndarray<nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

const Kernels& kernels_of(const std::string& unit) {
  if (const Kernels* kernels = kernels_named(unit.c_str())) return *kernels;
  throw nb::value_error(("no unit \"" + unit + "\" runs on this processor").c_str());
}

class PackedMatrix {
 public:
  PackedMatrix(const std::string& format, Blocks blocks, int64_t num_rows, int64_t in_size)
      : num_rows_(num_rows), in_size_(in_size) {
    const SourceFormat& source = source_named(format);
    expect_blocks(source, num_rows, in_size, blocks.size());
    format_ = source.packed;
    group_bytes_ = group_bytes_of(format_, in_size);
    data_ = Buffer(static_cast<size_t>(packed_size(source, num_rows, in_size)));
    for (int64_t group = 0; group < num_groups(); group++)
      pack_group(source, blocks.data(), in_size, num_rows, group * row_group,
                 data_.data() + group * group_bytes_);
  }

  int64_t num_bytes() const { return static_cast<int64_t>(data_.size()); }
  bool takes_floats() const { return format_infos[format_].bits == 0; }
  bool takes_blocks() const { return quire::takes_blocks(format_); }

  void unpack(Output out) const {
    expect(static_cast<int64_t>(out.shape(0)) == num_rows_ &&
               static_cast<int64_t>(out.shape(1)) == in_size_,
           "out must have the matrix's shape");
    for (int64_t row = 0; row < num_rows_; row++)
      unpack_row(format_, data_.data() + row / row_group * group_bytes_, in_size_,
                 static_cast<int>(row % row_group), out.data() + row * in_size_);
  }

  // columns: the bytes of ActivationGroups [column][in_size / 32] or of ActivationBlocks
  // [column][in_size / 256], or floats [column][in_size].
  void multiply(const std::string& unit, Columns columns, int num_columns, Output out,
                std::optional<Columns> residuals) const {
    const int64_t a_column = takes_floats()   ? in_size_
                             : takes_blocks() ? in_size_ / block_group
                                              : in_size_ / group_size;
    const size_t size = takes_floats()   ? sizeof(float)
                        : takes_blocks() ? sizeof(ActivationBlock)
                                         : sizeof(ActivationGroup);
    expect_within("num_columns", num_columns, 1, most_columns);
    expect(columns.nbytes() == bytes_of(checked_product(a_column, num_columns), size),
           "the columns have another size");
    expect(!residuals || (!takes_floats() && residuals->nbytes() == columns.nbytes()),
           "residuals are as many as the columns");
    expect(static_cast<int64_t>(out.shape(0)) == num_columns &&
               static_cast<int64_t>(out.shape(1)) == num_rows_,
           "out must be [columns, rows]");
    Product product{};
    product.format = format_;
    product.weights = data_.data();
    product.group_bytes = group_bytes_;
    product.in_size = in_size_;
    product.num_groups = static_cast<int>(num_groups());
    product.num_rows = static_cast<int>(num_rows_);
    product.columns = columns.data();
    product.column_stride = a_column;
    if (residuals) product.residuals = residuals->data();
    product.num_columns = num_columns;
    product.out = out.data();
    product.out_stride = num_rows_;
    kernels_of(unit).product(product);
  }

 private:
  static constexpr int most_columns = 1 << 20;
  int64_t num_groups() const { return (num_rows_ + row_group - 1) / row_group; }

  Format format_;
  int64_t num_rows_, in_size_, group_bytes_ = 0;
  Buffer data_;
};

}  // namespace

void bind_weights(nb::module_& m) {
  m.attr("peak_round") = 2 * 4096;  // operations in a round of peak_dots
  m.def(
      "peak_dots",
      [](const std::string& unit, int64_t rounds) {
        const Kernels& kernels = kernels_of(unit);
        expect_within("rounds", rounds, 0, int64_t{1} << 40);
        nb::gil_scoped_release released;
        return kernels.peak_dots(rounds);
      },
      "unit"_a, "rounds"_a);
  nb::class_<PackedMatrix>(m, "PackedMatrix")
      .def(nb::init<const std::string&, Blocks, int64_t, int64_t>(), "format"_a, "blocks"_a,
           "num_rows"_a, "in_size"_a)
      .def("unpack", &PackedMatrix::unpack, "out"_a)
      .def("multiply", &PackedMatrix::multiply, "unit"_a, "columns"_a, "num_columns"_a, "out"_a,
           "residuals"_a = nb::none())
      .def_prop_ro("num_bytes", &PackedMatrix::num_bytes)
      .def_prop_ro("takes_floats", &PackedMatrix::takes_floats)
      .def_prop_ro("takes_blocks", &PackedMatrix::takes_blocks);
}

}  // namespace quire
