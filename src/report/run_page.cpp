#include "report/run_page.h"

#include <iterator>
#include <map>
#include <string_view>

#include "net/secrets.h"
#include "report/html_text.h"
#include "report/web_files.h"

namespace bough {

std::string inside_script(const Json& data) {
  std::string out;
  for (const char c : dump_line(data)) out += c == '<' ? "\\u003c" : std::string(1, c);
  return out;
}

std::string run_page(const std::string& title, const Json* data) {
  // The files in the order of CMakeLists.txt: the page, its style, its scripts.
  std::string_view page = kWebFiles[0];
  std::map<std::string_view, std::string> parts = {{"title", html_escape(title)},
                                                   {"nonce", random_hex(16)},
                                                   {"style", std::string(kWebFiles[1])},
                                                   {"data", data ? inside_script(*data) : "null"}};
  for (size_t i = 2; i < std::size(kWebFiles); ++i) parts["script"] += kWebFiles[i];
  std::string out;
  for (size_t mark; (mark = page.find("{{")) != std::string_view::npos;) {
    const size_t end = page.find("}}", mark);
    out += page.substr(0, mark);
    out += parts.at(page.substr(mark + 2, end - mark - 2));
    page.remove_prefix(end + 2);
  }
  return out += page;
}

}  // namespace bough
