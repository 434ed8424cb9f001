#include "torch_binding.h"

#define Py_LIMITED_API 0x03090000
#include <Python.h>

#include <atomic>
#include <cstring>

#include "kernels.h"
#include "parallel.h"

namespace layout_kernels {

namespace {

std::atomic<const Kernels*> chosen{nullptr};
thread_local Scratch scale_scratch;
constexpr int64_t kKeepScale = 1 << 20;

const Kernels& kernels() {
  const Kernels* k = chosen.load(std::memory_order_acquire);
  if (k == nullptr) {
    k = best_level();
    chosen.store(k, std::memory_order_release);
  }
  return *k;
}

void run(int64_t n, void (*body)(int64_t, int64_t, void*), void* context) {
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, n, 1, body, context));
}

Pool pool() { return {static_cast<int64_t>(torch::stable::get_num_threads()), run}; }

DType type_of(const Tensor& t, const char* name) {
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  if (dtype == aoti_torch_dtype_bfloat16()) return DType::bf16;
  if (dtype == aoti_torch_dtype_float16()) return DType::f16;
  STD_TORCH_CHECK(dtype == aoti_torch_dtype_float32(), name, " must be float32, bfloat16 or float16 here");
  return DType::f32;
}

int32_t torch_type(DType t) {
  if (t == DType::bf16) return aoti_torch_dtype_bfloat16();
  return t == DType::f16 ? aoti_torch_dtype_float16() : aoti_torch_dtype_float32();
}

int64_t width_of(const Tensor& t, const char* name) {
  int64_t dim = t.dim();
  STD_TORCH_CHECK(dim >= 1, name, " must have at least one dimension");
  int64_t width = t.sizes()[dim - 1];
  STD_TORCH_CHECK(width > 0, "the last dimension of ", name, " must be at least 1");
  return width;
}

// One of `count` codes, as the operations' Python gives them.
int64_t code(int64_t value, int64_t count, const char* name) {
  STD_TORCH_CHECK(value >= 0 && value < count, name, " must be a code below ", count, "; given ", value);
  return value;
}

Activation activation_of(int64_t value) { return static_cast<Activation>(code(value, 3, "activation")); }

// Straight to the allocating call of the C interface: the stable `empty` goes through the dispatcher by name.
Tensor new_tensor(int64_t dim, const int64_t* sizes, DType type) {
  constexpr int64_t kInline = 8;
  int64_t fixed[kInline];
  std::vector<int64_t> many;
  int64_t* strides = fixed;
  if (dim > kInline) {
    many.resize(dim);
    strides = many.data();
  }
  int64_t step = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = step;
    step *= sizes[i] ? sizes[i] : 1;
  }
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dim, sizes, strides, torch_type(type), aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor new_like(const Tensor& t, DType type) { return new_tensor(t.dim(), t.sizes().data(), type); }

Tensor new_like(const Tensor& t, int64_t width, DType type) {
  std::vector<int64_t> sizes(t.sizes().begin(), t.sizes().end());
  sizes.back() = width;
  return new_tensor(t.dim(), sizes.data(), type);
}

Tensor new_vector(int64_t size, DType type) { return new_tensor(1, &size, type); }

// A tensor as rows of its last dimension: leading dimensions that lie behind one another in memory count as one. What
// needs more than three, or a last stride that is not 1, is copied first; `holder` keeps the copy alive.
struct RowView {
  Tensor holder;
  const void* data;
  Rows rows;
  int64_t count;
  int64_t width;
  DType type;
};

bool collapse(const Tensor& t, Rows& rows) {
  auto sizes = t.sizes(), strides = t.strides();
  int64_t dim = t.dim();
  if (strides[dim - 1] != 1 && sizes[dim - 1] > 1) return false;
  rows = {{1, 1, 1}, {0, 0, 0}};
  int at = 2;
  bool open = false;  // rows.size[at] holds a dimension
  for (int64_t i = dim - 2; i >= 0; --i) {
    if (sizes[i] == 1) continue;
    if (open && strides[i] == rows.size[at] * rows.stride[at]) {
      rows.size[at] *= sizes[i];
      continue;
    }
    if (open && --at < 0) return false;
    rows.size[at] = sizes[i];
    rows.stride[at] = strides[i];
    open = true;
  }
  return true;
}

RowView rows_of(const Tensor& t, const char* name) {
  RowView view{t, nullptr, {}, 0, width_of(t, name), type_of(t, name)};
  if (!collapse(t, view.rows)) {
    view.holder = torch::stable::contiguous(t);
    collapse(view.holder, view.rows);
  }
  view.count = view.width ? t.numel() / view.width : 0;
  view.data = view.holder.const_data_ptr();
  return view;
}

// Rows at one distance, for products.
RowView flat_rows_of(const Tensor& t, const char* name) {
  RowView view = rows_of(t, name);
  if (view.rows.size[0] * view.rows.size[1] != 1) {
    view.holder = torch::stable::contiguous(t);
    collapse(view.holder, view.rows);
    view.data = view.holder.const_data_ptr();
  }
  return view;
}

int64_t distance(const RowView& view) { return view.count > 1 ? view.rows.stride[2] : view.width; }

// The weight of a norm in fp32, 1 + weight for one_plus_scale; in scratch of this thread, which the others read.
const float* scale_of(const OptionalTensor& weight, int64_t flavour, int64_t width) {
  if (!weight.has_value()) return nullptr;
  STD_TORCH_CHECK(weight->dim() == 1 && weight->sizes()[0] == width, "weight must be [", width, "]");
  Tensor w = weight->stride(0) == 1 || width == 1 ? *weight : torch::stable::contiguous(*weight);
  DType type = type_of(w, "weight");
  bool plus = flavour == static_cast<int64_t>(Flavour::one_plus_scale);
  if (type == DType::f32 && !plus && w.get() == weight->get()) return static_cast<const float*>(w.const_data_ptr());
  float* scale = static_cast<float*>(scale_scratch.get(width * static_cast<int64_t>(sizeof(float))));
  kernels().widen(w.const_data_ptr(), type, scale, width);
  if (plus) {
    for (int64_t i = 0; i < width; ++i) scale[i] += 1.0f;
  }
  return scale;
}

// cast_then_scale multiplies in the wider dtype of weight and input; two half dtypes promote to fp32.
DType result_type(DType x, const OptionalTensor& weight, bool round_first) {
  if (!round_first || !weight.has_value()) return x;
  return type_of(*weight, "weight") == x ? x : DType::f32;
}

bool rounds_first(int64_t flavour) {
  return code(flavour, 3, "flavour") == static_cast<int64_t>(Flavour::cast_then_scale);
}

void* pointer(const OptionalTensor& t) { return t.has_value() ? t->data_ptr() : nullptr; }

}  // namespace

Tensor cpu_rms_norm(Tensor x, OptionalTensor weight, double eps, int64_t flavour) {
  RowView v = rows_of(x, "x");
  bool first = rounds_first(flavour);
  DType type = result_type(v.type, weight, first);
  Tensor y = new_like(x, type);
  if (v.count == 0) return y;
  RmsNormArgs a{
      v.data, y.data_ptr(), scale_of(weight, flavour, v.width), v.rows, v.width, static_cast<float>(eps), v.type, type,
      first,  false};
  rms_norm(kernels(), pool(), a, v.count);
  scale_scratch.trim(kKeepScale);
  return y;
}

std::tuple<Tensor, Tensor> cpu_rms_norm_backward(Tensor grad, Tensor x, OptionalTensor weight, double eps,
                                                 int64_t flavour, bool need_x, bool need_weight) {
  RowView v = rows_of(x, "x"), g = rows_of(grad, "grad");
  STD_TORCH_CHECK(g.count == v.count && g.width == v.width, "grad must have the shape of x");
  STD_TORCH_CHECK(g.type == v.type || g.type == DType::f32, "grad must have the dtype of x or float32");
  Tensor dx = need_x ? new_like(x, v.type) : new_vector(0, v.type);
  Tensor dweight = new_vector(need_weight ? v.width : 0, DType::f32);
  RmsNormBackwardArgs a{v.data,
                        g.data,
                        need_x ? dx.data_ptr() : nullptr,
                        scale_of(weight, flavour, v.width),
                        v.rows,
                        g.rows,
                        v.width,
                        static_cast<float>(eps),
                        v.type,
                        g.type,
                        rounds_first(flavour)};
  float* sums = need_weight ? static_cast<float*>(dweight.data_ptr()) : nullptr;
  rms_norm_backward(kernels(), pool(), a, v.count, sums);
  return {dx, dweight};
}

Tensor cpu_gated_activation(Tensor gate_up, int64_t activation) {
  RowView v = rows_of(gate_up, "gate_up");
  int64_t width = v.width / 2;
  Tensor y = new_like(gate_up, width, v.type);
  if (v.count == 0) return y;
  GatedActivationArgs a{v.data, nullptr, y.data_ptr(), v.rows, {}, width, v.type, activation_of(activation)};
  gated_activation(kernels(), pool(), a, v.count, false);
  return y;
}

Tensor cpu_gated_activation_backward(Tensor grad, Tensor gate_up, int64_t activation) {
  RowView v = rows_of(gate_up, "gate_up"), g = rows_of(grad, "grad");
  int64_t width = v.width / 2;
  STD_TORCH_CHECK(g.count == v.count && g.width == width && g.type == v.type,
                  "grad must have the dtype of gate_up and half its width");
  Tensor out = new_like(gate_up, v.type);
  if (v.count == 0) return out;
  GatedActivationArgs a{v.data, g.data, out.data_ptr(), v.rows, g.rows, width, v.type, activation_of(activation)};
  gated_activation(kernels(), pool(), a, v.count, true);
  return out;
}

namespace {

struct GatedViews {
  Tensor x, gate, grad;
  GatedNormArgs args;
  int64_t rows;
};

GatedViews gated_views(const Tensor& x, const Tensor& gate, const OptionalTensor& weight, double eps, int64_t flavour,
                       int64_t order, int64_t group_size, int64_t activation) {
  GatedViews v{torch::stable::contiguous(x), torch::stable::contiguous(gate), x, {}, 0};
  int64_t width = width_of(x, "x"), group = group_size ? group_size : width;
  STD_TORCH_CHECK(gate.numel() == x.numel(), "gate must have the shape of x");
  STD_TORCH_CHECK(group > 0 && width % group == 0, "group_size must divide the width ", width);
  GatedNormArgs& a = v.args;
  a.x = v.x.const_data_ptr();
  a.gate = v.gate.const_data_ptr();
  a.scale = scale_of(weight, flavour, width);
  a.width = group;
  a.groups = width / group;
  a.eps = static_cast<float>(eps);
  a.x_type = type_of(x, "x");
  a.gate_type = type_of(gate, "gate");
  a.gate_first = code(order, 2, "order") == 0;
  a.round_first = rounds_first(flavour);
  a.sigmoid = code(activation, 2, "activation") == 1;
  a.y_type = a.gate_first ? result_type(a.x_type, weight, a.round_first) : a.x_type;
  // The product of weight and rounded norm is rounded to the dtype they share.
  a.round_scaled = weight.has_value() && a.round_first && type_of(*weight, "weight") == a.x_type;
  v.rows = x.numel() / width;
  return v;
}

}  // namespace

Tensor cpu_gated_rms_norm(Tensor x, Tensor gate, OptionalTensor weight, double eps, int64_t flavour, int64_t order,
                          int64_t group_size, int64_t activation) {
  GatedViews v = gated_views(x, gate, weight, eps, flavour, order, group_size, activation);
  Tensor y = new_like(x, v.args.y_type);
  v.args.y = y.data_ptr();
  gated_norm(kernels(), pool(), v.args, v.rows);
  scale_scratch.trim(kKeepScale);
  return y;
}

std::tuple<Tensor, Tensor, Tensor> cpu_gated_rms_norm_backward(Tensor grad, Tensor x, Tensor gate,
                                                               OptionalTensor weight, double eps, int64_t flavour,
                                                               int64_t order, int64_t group_size, int64_t activation,
                                                               bool need_weight) {
  GatedViews v = gated_views(x, gate, weight, eps, flavour, order, group_size, activation);
  STD_TORCH_CHECK(grad.numel() == x.numel(), "grad must have the shape of x");
  STD_TORCH_CHECK(type_of(grad, "grad") == v.args.y_type, "grad must have the dtype of the result");
  v.grad = torch::stable::contiguous(grad);
  Tensor dx = new_like(x, v.args.x_type), dgate = new_like(gate, v.args.gate_type);
  Tensor dweight = new_vector(need_weight ? v.args.width * v.args.groups : 0, DType::f32);
  v.args.dy = v.grad.const_data_ptr();
  v.args.dx = dx.data_ptr();
  v.args.dgate = dgate.data_ptr();
  gated_norm_backward(kernels(), pool(), v.args, v.rows,
                      need_weight ? static_cast<float*>(dweight.data_ptr()) : nullptr);
  scale_scratch.trim(kKeepScale);
  return {dx, dgate, dweight};
}

namespace {

void check_matrix(const Tensor& w, const char* name, int64_t width, DType type) {
  STD_TORCH_CHECK(w.dim() == 2 && w.sizes()[0] > 0 && w.sizes()[1] == width, name, " must be [rows, ", width,
                  "], rows at least 1");
  STD_TORCH_CHECK(w.stride(1) == 1 || width == 1, name, " must have contiguous rows");
  STD_TORCH_CHECK(type_of(w, name) == type, name, " must have the dtype of x");
}

void check_bias(const OptionalTensor& b, const char* name, int64_t size, DType type) {
  if (!b.has_value()) return;
  STD_TORCH_CHECK(b->dim() == 1 && b->sizes()[0] == size && (b->stride(0) == 1 || size == 1), name, " must be [", size,
                  "], contiguous");
  STD_TORCH_CHECK(type_of(*b, name) == type, name, " must have the dtype of x");
}

}  // namespace

Tensor cpu_linear(Tensor x, Tensor weight, OptionalTensor bias) {
  RowView v = flat_rows_of(x, "x");
  check_matrix(weight, "weight", v.width, v.type);
  int64_t n = weight.sizes()[0];
  check_bias(bias, "bias", n, v.type);
  Tensor y = new_like(x, n, v.type);
  if (v.count == 0) return y;
  LinearArgs a{v.data, weight.data_ptr(), pointer(bias), y.data_ptr(),     v.count,
               n,      v.width,           distance(v),   weight.stride(0), v.type};
  linear(kernels(), pool(), a);
  return y;
}

// The code of the flavour "none", one beyond those of `Flavour`: x goes into the products as it is.
constexpr int64_t kNoNorm = 3;

Tensor cpu_rms_norm_mlp(Tensor x, OptionalTensor norm_weight, Tensor gate_up, Tensor down, double eps, int64_t flavour,
                        int64_t activation, OptionalTensor gate_up_bias, OptionalTensor down_bias) {
  RowView v = flat_rows_of(x, "x");
  check_matrix(gate_up, "gate_up", v.width, v.type);
  STD_TORCH_CHECK(gate_up.sizes()[0] % 2 == 0, "gate_up must have an even number of rows");
  int64_t size = gate_up.sizes()[0] / 2;
  check_matrix(down, "down", size, v.type);
  int64_t out = down.sizes()[0];
  check_bias(gate_up_bias, "gate_up_bias", 2 * size, v.type);
  check_bias(down_bias, "down_bias", out, v.type);
  Tensor y = new_like(x, out, v.type);
  if (v.count == 0) return y;
  MlpArgs a{};
  a.x = v.data, a.normalise = flavour != kNoNorm;
  if (a.normalise) {
    a.norm_scale = scale_of(norm_weight, flavour, v.width), a.round_first = rounds_first(flavour);
  } else {
    STD_TORCH_CHECK(!norm_weight.has_value(), "norm_weight must be None where there is no norm");
  }
  a.gate_up = gate_up.data_ptr(), a.down = down.data_ptr();
  a.gate_up_bias = pointer(gate_up_bias), a.down_bias = pointer(down_bias), a.y = y.data_ptr();
  a.m = v.count, a.hidden = v.width, a.intermediate = size, a.out = out, a.ldx = distance(v);
  a.ld_gate_up = gate_up.stride(0), a.ld_down = down.stride(0), a.eps = static_cast<float>(eps), a.type = v.type;
  a.activation = activation_of(activation);
  rms_norm_mlp(kernels(), pool(), a);
  scale_scratch.trim(kKeepScale);
  return y;
}

}  // namespace layout_kernels

#define LK_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define LK_LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)

LK_LIBRARY(TORCH_EXTENSION_NAME, m) {
  m.def("cpu_rms_norm(Tensor x, Tensor? weight, float eps, int flavour) -> Tensor");
  m.def(
      "cpu_rms_norm_backward(Tensor grad, Tensor x, Tensor? weight, float eps, int flavour, bool need_x, "
      "bool need_weight) -> (Tensor, Tensor)");
  m.def("cpu_gated_activation(Tensor gate_up, int activation) -> Tensor");
  m.def("cpu_gated_activation_backward(Tensor grad, Tensor gate_up, int activation) -> Tensor");
  m.def(
      "cpu_gated_rms_norm(Tensor x, Tensor gate, Tensor? weight, float eps, int flavour, int order, int group_size, "
      "int activation) -> Tensor");
  m.def(
      "cpu_gated_rms_norm_backward(Tensor grad, Tensor x, Tensor gate, Tensor? weight, float eps, int flavour, "
      "int order, int group_size, int activation, bool need_weight) -> (Tensor, Tensor, Tensor)");
  m.def("cpu_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def(
      "cpu_rms_norm_mlp(Tensor x, Tensor? norm_weight, Tensor gate_up, Tensor down, float eps, int flavour, "
      "int activation, Tensor? gate_up_bias, Tensor? down_bias) -> Tensor");
}

LK_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, m) {
  m.impl("cpu_rms_norm", TORCH_BOX(&layout_kernels::cpu_rms_norm));
  m.impl("cpu_rms_norm_backward", TORCH_BOX(&layout_kernels::cpu_rms_norm_backward));
  m.impl("cpu_gated_activation", TORCH_BOX(&layout_kernels::cpu_gated_activation));
  m.impl("cpu_gated_activation_backward", TORCH_BOX(&layout_kernels::cpu_gated_activation_backward));
  m.impl("cpu_gated_rms_norm", TORCH_BOX(&layout_kernels::cpu_gated_rms_norm));
  m.impl("cpu_gated_rms_norm_backward", TORCH_BOX(&layout_kernels::cpu_gated_rms_norm_backward));
  m.impl("cpu_linear", TORCH_BOX(&layout_kernels::cpu_linear));
  m.impl("cpu_rms_norm_mlp", TORCH_BOX(&layout_kernels::cpu_rms_norm_mlp));
}

namespace {

// The levels this processor runs, from the plainest to the best.
PyObject* levels(PyObject*, PyObject*) {
  PyObject* list = PyList_New(0);
  for (int64_t i = 0; list != nullptr && i < layout_kernels::level_count(); ++i) {
    const char* name = layout_kernels::level_name(i);
    if (name == nullptr) continue;
    PyObject* item = PyUnicode_FromString(name);
    if (item == nullptr || PyList_Append(list, item) != 0) Py_CLEAR(list);
    Py_XDECREF(item);
  }
  return list;
}

// select_level(name): the level that later calls run; ValueError when this processor lacks it.
PyObject* select_level(PyObject*, PyObject* name) {
  PyObject* bytes = PyUnicode_AsUTF8String(name);
  if (bytes == nullptr) return nullptr;
  const layout_kernels::Kernels* k = layout_kernels::level(PyBytes_AsString(bytes));
  Py_DECREF(bytes);
  if (k == nullptr) {
    PyErr_Format(PyExc_ValueError, "%R is no level of this processor", name);
    return nullptr;
  }
  layout_kernels::chosen.store(k, std::memory_order_release);
  Py_RETURN_NONE;
}

PyObject* current_level(PyObject*, PyObject*) { return PyUnicode_FromString(layout_kernels::kernels().name); }

PyMethodDef methods[] = {
    {"levels", levels, METH_NOARGS, "The levels this processor runs, from the plainest to the best."},
    {"select_level", select_level, METH_O, "Choose the level that later calls run."},
    {"current_level", current_level, METH_NOARGS, "The level that calls run."},
    {nullptr, nullptr, 0, nullptr},
};

#define LK_STRING_(x) #x
#define LK_STRING(x) LK_STRING_(x)
#define LK_JOIN_(a, b) a##b
#define LK_JOIN(a, b) LK_JOIN_(a, b)

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, LK_STRING(TORCH_EXTENSION_NAME), nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

// INTERFACE: see ops/native.py, which refuses another number.
PyMODINIT_FUNC LK_JOIN(PyInit_, TORCH_EXTENSION_NAME)(void) {
  PyObject* made = PyModule_Create(&module);
  if (made != nullptr && PyModule_AddIntConstant(made, "INTERFACE", 3) != 0) Py_CLEAR(made);
  return made;
}
