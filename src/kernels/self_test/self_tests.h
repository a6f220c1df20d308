// Tests of the CUDA kernels on the user's device: each kernel against the CPU's result in fp64. `bough` runs
// them in a child process before the first use of a GPU (cli/self_tests.h).
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace bough {

struct TestedKernel {
  std::string name;         // kernels/common/cuda_library.h
  std::string replacement;  // what runs if the kernel is left out, such as "its reference in tensor ops"
  // Attention and products: the replacement takes more than three times as long. This is known from the peak
  // rates: 312 TFLOPS by tensor cores in bf16, 19.5 in fp32 (A100); 989 and 67 (H100).
  bool is_much_faster = false;
};

struct SelfTest {
  std::string name;
  std::vector<TestedKernel> kernels;  // fastest first; each runs only if all before it are left out
  // Compares what runs on the device with the CPU. Small inputs: milliseconds on a GPU. Throws WrongResult,
  // or what libtorch throws.
  std::function<void(c10::Device)> run;
};

// The result of a kernel differs from the reference by more than the number format explains.
struct WrongResult : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Every op with a CUDA kernel, flash_segments and cuda_graphs.
std::vector<SelfTest> self_tests();

// Tests libtorch's own copies, sums and products on the device. Every reference needs them.
void test_libtorch(c10::Device device);

}  // namespace bough
