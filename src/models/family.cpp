#include "models/family.h"

#include "base/error.h"

namespace bough {

namespace {

#define BOUGH_LIST_FAMILY(name) &families::name,
constexpr const Family* kFamilies[] = {BOUGH_FAMILIES(BOUGH_LIST_FAMILY)};
#undef BOUGH_LIST_FAMILY

}  // namespace

std::span<const Family* const> all_families() {
  return kFamilies;
}

const Family& family_named(const std::string& model_type) {
  for (const Family* family : kFamilies)
    if (model_type == family->model_type) return *family;
  throw UserError(str("got ", quoted(model_type), ", expected ", family_names(&Family::model_type)));
}

std::string family_names(const char* Family::*name, const char* separator, const char* last_separator) {
  std::string names;
  for (const Family* const& family : kFamilies)
    names += str(&family == std::begin(kFamilies)     ? ""
                 : &family == std::end(kFamilies) - 1 ? last_separator
                                                      : separator,
                 family->*name);
  return names;
}

}  // namespace bough
