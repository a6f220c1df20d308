// Remedies for errors of a GPU. libtorch, CUDA and NCCL say what failed, but not what helps.
#pragma once

#include <string>
#include <string_view>

namespace bough {

// Returns a remedy for the text of an error of libtorch, CUDA or NCCL: a sentence that follows the text.
// Empty if the text is of no known kind. A run that such an error ended continues from its last checkpoint.
std::string remedy_for_device_error(std::string_view text);

}  // namespace bough
