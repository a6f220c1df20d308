// Compares an op on a device with the same op on the CPU in fp64, and the parts of self_tests().
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <vector>

#include "kernels/self_test/self_tests.h"

namespace bough {

// Throws WrongResult unless the sizes are equal and the error is at most tolerance(precision), relative to
// the largest element of `expected`, or to `least_scale` if that is larger. what: begins the message.
void check_close(const std::string& what, const at::Tensor& got, const at::Tensor& expected,
                 at::ScalarType precision, double least_scale = 0.1);

// Throws WrongResult unless the tensors have the same sizes and elements.
void check_equal(const std::string& what, const at::Tensor& got, const at::Tensor& expected);

// How closely an op's results are compared.
struct OpTolerance {
  std::optional<at::ScalarType> precision = {};  // nullopt: each result by its own dtype
  double least_scale = 0.1;
};

// Calls bough::<op> twice: on `device` with the arguments, and on the CPU with all floating-point tensors in
// fp64. Compares the results, and the arguments that the op writes.
void check_op(const std::string& op, const std::vector<c10::IValue>& arguments, at::Device device,
              const OpTolerance& tolerance = {});

// Calls bough::<op> on the CPU and returns its results.
std::vector<at::Tensor> call_on_cpu(const std::string& op, const std::vector<c10::IValue>& arguments);

std::vector<SelfTest> row_op_tests();  // norms, activations, losses, optimizer: one kernel for each op
std::vector<SelfTest> product_tests();
std::vector<SelfTest> experts_tests();
std::vector<SelfTest> attention_tests();  // of training and generation, with choice of pages
std::vector<SelfTest> graph_tests();

}  // namespace bough
