// Checked arithmetic and upper bounds for sizes that come from a file or from Python. Within these
// bounds no product of sizes in the kernels overflows its type.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace quire {

// Far beyond any model; quire.model.spec refuses larger ones with a message for the user.
constexpr int64_t max_hidden_size = int64_t{1} << 20;
constexpr int64_t max_row_size = int64_t{1} << 22;  // ffn_size, or all query heads
constexpr int64_t max_vocabulary = int64_t{1} << 24;
constexpr int64_t max_layers = int64_t{1} << 12;
constexpr int64_t max_experts = int64_t{1} << 14;
constexpr int64_t max_heads = int64_t{1} << 14;
constexpr int64_t max_head_dim = int64_t{1} << 14;
constexpr int64_t max_positions = int64_t{1} << 30;  // an int holds this plus a tile
constexpr int64_t max_blocks = int64_t{1} << 30;     // of the KV cache
constexpr int64_t max_step_rows = int64_t{1} << 22;

// a * b, of sizes that are not negative; throws std::length_error where it does not fit.
inline int64_t checked_product(int64_t a, int64_t b) {
  int64_t product;
  if (a < 0 || b < 0 || __builtin_mul_overflow(a, b, &product))
    throw std::length_error("a size of " + std::to_string(a) + " times " + std::to_string(b) +
                            " cannot be held");
  return product;
}

// a + b, as above.
inline int64_t checked_sum(int64_t a, int64_t b) {
  int64_t sum;
  if (a < 0 || b < 0 || __builtin_add_overflow(a, b, &sum))
    throw std::length_error("a size of " + std::to_string(a) + " plus " + std::to_string(b) +
                            " cannot be held");
  return sum;
}

template <class... Others>
int64_t checked_product(int64_t a, int64_t b, Others... others) {
  return checked_product(checked_product(a, b), others...);
}

inline size_t bytes_of(int64_t count, size_t size) {
  return static_cast<size_t>(checked_product(count, static_cast<int64_t>(size)));
}

// Throws std::invalid_argument unless low <= value <= high.
inline void expect_within(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    throw std::invalid_argument(std::string(name) + " must be from " + std::to_string(low) +
                                " to " + std::to_string(high) + ", got " + std::to_string(value));
}

inline void expect(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

}  // namespace quire
