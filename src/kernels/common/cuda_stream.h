// A CUDA stream without CUDA's headers, for the launchers' headers (x_cuda.h).
#pragma once

struct CUstream_st;

namespace bough {

using CudaStream = CUstream_st*;  // cudaStream_t

}  // namespace bough
