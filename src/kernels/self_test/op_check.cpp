#include "kernels/self_test/op_check.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <algorithm>

#include "base/error.h"
#include "kernels/common/closeness.h"
#include "kernels/self_test/self_tests.h"

namespace bough {

namespace {
c10::OperatorHandle find_op_by_name(const std::string& op) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("bough::" + op).c_str(), "");
}

torch::jit::Stack call(const c10::OperatorHandle& op, torch::jit::Stack stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(&stack);
  return stack;
}

template <class Move>
torch::jit::Stack map_tensors(const std::vector<c10::IValue>& arguments, Move&& move) {
  torch::jit::Stack mapped;
  for (const c10::IValue& argument : arguments)
    mapped.push_back(argument.isTensor() ? c10::IValue(move(argument.toTensor())) : argument);
  return mapped;
}
}  // namespace

void check_close(const std::string& what, const at::Tensor& got, const at::Tensor& expected,
                 at::ScalarType precision, double least_scale) {
  if (got.sizes() != expected.sizes())
    throw WrongResult(bough::str(what, " has the sizes ", got.sizes(), ", expected ", expected.sizes()));
  if (got.numel() == 0) return;
  const at::Tensor reference = expected.cpu().to(at::kDouble);
  const double scale = std::max(reference.abs().max().item<double>(), least_scale);
  const double error = (got.cpu().to(at::kDouble) - reference).abs().max().item<double>() / scale;
  if (!(error <= tolerance(precision)))  // also if NaN
    throw WrongResult(str(what, " differs from the reference by ", error,
                          " of its largest element, expected ", "at most ", tolerance(precision)));
}

void check_equal(const std::string& what, const at::Tensor& got, const at::Tensor& expected) {
  if (!at::equal(got.cpu(), expected.cpu())) throw WrongResult(str(what, " differs from the reference"));
}

void check_op(const std::string& name, const std::vector<c10::IValue>& arguments, at::Device device,
              const OpTolerance& tolerance) {
  const c10::OperatorHandle op = find_op_by_name(name);
  // Both calls get copies, because an op may write its arguments.
  const auto on_device = map_tensors(arguments, [&](const at::Tensor& x) {
    return x.to(device, x.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  });
  const auto exact = map_tensors(arguments, [](const at::Tensor& x) {
    return x.is_floating_point() ? x.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true) : x.clone();
  });
  const auto got = call(op, on_device), expected = call(op, exact);
  const auto compare = [&](const std::string& what, const c10::IValue& a, const c10::IValue& b) {
    if (!a.isTensor()) return;
    const at::Tensor& x = a.toTensor();
    check_close(str(name, ": ", what, " in ", c10::toString(x.scalar_type())), x, b.toTensor(),
                tolerance.precision.value_or(x.scalar_type()), tolerance.least_scale);
  };
  for (size_t i = 0; i < got.size(); ++i) compare(str("result ", i), got[i], expected[i]);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = op.schema().arguments()[i];
    if (argument.alias_info() && argument.alias_info()->isWrite())
      compare(argument.name(), on_device[i], exact[i]);
  }
}

std::vector<at::Tensor> call_on_cpu(const std::string& op, const std::vector<c10::IValue>& arguments) {
  std::vector<at::Tensor> results;
  for (const c10::IValue& result : call(find_op_by_name(op), arguments)) results.push_back(result.toTensor());
  return results;
}

}  // namespace bough
