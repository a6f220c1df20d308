// Keys and tokens that nobody can guess.
#pragma once

#include <cstddef>
#include <string>

namespace bough {

// `bytes` bytes of the system's random source in hexadecimal: for keys and ids that nobody can guess.
std::string random_hex(size_t bytes);

// Compares in a time that tells nothing about the key, which must not be empty.
bool same_key(const std::string& given, const std::string& key);

}  // namespace bough
