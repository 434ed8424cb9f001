// The CPU kernels of layout_kernels: plain pointers, sizes and strides; no torch header.
//
// Two layers. A *level* (level_*.cpp) holds the arithmetic, compiled once per instruction set, as functions over a
// range of rows or one tile; it starts no thread and allocates nothing. The drivers (norms.cpp, products.cpp) cut an
// operation into such ranges, find scratch memory and hand the ranges to the caller's thread pool.
#pragma once

#include <cstdint>

namespace layout_kernels {

enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

// static: a level must not leave a copy of it for other files to use.
static inline int64_t size_of(DType t) { return t == DType::f32 ? 4 : 2; }

// Where a normalised value is rounded to the input's dtype; ops/rms_norm/reference.py states the same in PyTorch.
enum class Flavour : int32_t { cast_then_scale = 0, scale_then_cast = 1, one_plus_scale = 2 };

enum class Activation : int32_t { silu = 0, gelu = 1, gelu_tanh = 2 };

// A [rows, width] view of up to four dimensions: row r starts at the mixed-radix offset of r over `size`, in elements.
// The last stride is 1.
struct Rows {
  int64_t size[3];
  int64_t stride[3];
};

struct RmsNormArgs {
  const void* x;
  void* y;             // contiguous rows
  const float* scale;  // [width]: the weight in fp32, 1 + weight for one_plus_scale, nullptr for none
  Rows rows;
  int64_t width;
  float eps;
  DType x_type, y_type;
  bool round_first;  // cast_then_scale
  bool streamed;     // the driver sets it: non-temporal stores to y; each row of it begins at a multiple of 64 bytes
};

struct RmsNormBackwardArgs {
  const void* x;
  const void* dy;
  void* dx;            // contiguous rows, nullptr when not wanted
  const float* scale;  // as in RmsNormArgs
  Rows x_rows, dy_rows;
  int64_t width;
  float eps;
  DType x_type, dy_type;
  bool round_first;
};

// y = act(gate) * up over rows of [gate | up]; each of the two steps rounds to the tensor's dtype, as PyTorch does.
struct GatedActivationArgs {
  const void* gate_up;
  const void* dy;  // backward only
  void* y;         // forward: [rows, width]; backward: d(gate_up), [rows, 2 * width]
  Rows gate_up_rows, dy_rows;
  int64_t width;
  DType type;
  Activation activation;
};

// The norm of Mamba's mixers: rows are groups of `width`, `groups` of them in a row of the scale.
struct GatedNormArgs {
  const void* x;
  const void* gate;
  const void* dy;      // backward only
  void* y;             // forward
  void* dx;            // backward
  void* dgate;         // backward
  const float* scale;  // [groups * width] or nullptr
  int64_t width, groups;
  float eps;
  DType x_type, gate_type, y_type;
  bool gate_first;    // scale(norm(x * act(gate))); otherwise scale(norm(x)) * act(gate)
  bool round_first;   // the norm is rounded to x's dtype before the scale
  bool round_scaled;  // the scaled norm too
  bool sigmoid;       // act: sigmoid, otherwise silu
};

// c[m, n] = sum over k of x[m, k] * w[n, k] in fp32, in an order that K and the level fix; on AVX2 also whether m is
// 1, below 12 or more. The threads and the tiles have no part in it. pair == 0: y[m, n] = round(c + bias). pair == P:
// rows n and P + n of w are gate and up, n < P, and y[m, n] = round(round(act(round(gate))) * round(up)).
struct ProductArgs {
  const void* x;  // the operand form of the level (see Kernels::operand_type), [m, k], leading dimension ldx
  const void* w;  // [n, k], leading dimension ldw, w_type
  const void* bias;
  void* y;  // [m, n or pair], leading dimension ldy, y_type; values are rounded to w_type first
  int64_t m, n, k, ldx, ldw, ldy;
  int64_t pair;
  int64_t tile_m, tile_n;  // a task is one tile; tile_n counts rows of w, a pair's half of it is a multiple of 16
  DType w_type, y_type, bias_type;
  Activation activation;
  bool turned;  // x is what Kernels::turn made, [strip][ldx][16 rows]; a tile then has all rows
};

struct Kernels {
  const char* name;
  void (*rms_norm)(const RmsNormArgs&, int64_t begin, int64_t end);
  // dscale: [width] fp32 sums over the range, nullptr when not wanted.
  void (*rms_norm_backward)(const RmsNormBackwardArgs&, int64_t begin, int64_t end, float* dscale);
  void (*gated_activation)(const GatedActivationArgs&, int64_t begin, int64_t end);
  void (*gated_activation_backward)(const GatedActivationArgs&, int64_t begin, int64_t end);
  void (*gated_norm)(const GatedNormArgs&, int64_t begin, int64_t end);
  void (*gated_norm_backward)(const GatedNormArgs&, int64_t begin, int64_t end, float* dscale);
  // Copies rows of x into the form that `product` reads, filled up with zeros to a multiple of 32 elements.
  void (*to_operand)(const void* x, int64_t ldx, DType x_type, void* operand, int64_t ld, DType operand_type,
                     int64_t width, int64_t rows);
  DType (*operand_type)(DType w_type);
  void (*widen)(const void* x, DType x_type, float* y, int64_t width);
  void (*product)(const ProductArgs&, int64_t task, void* scratch);
  // Bytes a call of `product` needs. A tile has at most max_tile_m rows and max_tile_n columns; of one row as many
  // columns as both make together.
  int64_t product_scratch;
  int64_t max_tile_m, max_tile_n;
  // Turns a strip of up to 16 rows of an operand, to[width][16]; nullptr where no product wants it. It pays up to
  // max_turned rows.
  void (*turn)(const void* x, int64_t ldx, int64_t rows, int64_t width, void* to);
  int64_t max_turned;
};

// The caller's thread pool: calls body(begin, end, context) on disjoint parts of [0, n), then returns.
struct Pool {
  int64_t threads;
  void (*run)(int64_t n, void (*body)(int64_t begin, int64_t end, void* context), void* context);
};

// Levels by name, from the plainest to the best: portable, avx2, avx512, avx512_bf16. nullptr: unknown or not
// supported by this processor. `best_level` is what `level("")` returns.
const Kernels* level(const char* name);
const Kernels* best_level();
int64_t level_count();
const char* level_name(int64_t i);  // nullptr when this processor lacks it
int64_t last_level_cache();         // bytes; 0 where the processor does not tell

// Drivers (norms.cpp).
void rms_norm(const Kernels&, const Pool&, const RmsNormArgs&, int64_t rows);
void rms_norm_backward(const Kernels&, const Pool&, const RmsNormBackwardArgs&, int64_t rows, float* dscale);
void gated_activation(const Kernels&, const Pool&, const GatedActivationArgs&, int64_t rows, bool backward);
void gated_norm(const Kernels&, const Pool&, const GatedNormArgs&, int64_t rows);
void gated_norm_backward(const Kernels&, const Pool&, const GatedNormArgs&, int64_t rows, float* dscale);

// Drivers (products.cpp). x rows are ldx apart, y rows contiguous.
struct LinearArgs {
  const void* x;
  const void* w;
  const void* bias;
  void* y;
  int64_t m, n, k, ldx, ldw;
  DType type;
};
void linear(const Kernels&, const Pool&, const LinearArgs&);

struct MlpArgs {
  const void* x;
  const float* norm_scale;
  bool normalise;
  const void *gate_up, *down, *gate_up_bias, *down_bias;
  void* y;  // [m, out]
  int64_t m, hidden, intermediate, out, ldx, ld_gate_up, ld_down;
  float eps;
  DType type;
  bool round_first;
  Activation activation;
};
void rms_norm_mlp(const Kernels&, const Pool&, const MlpArgs&);

}  // namespace layout_kernels
