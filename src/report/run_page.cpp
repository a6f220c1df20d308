#include "report/run_page.h"

#include <iterator>
#include <string_view>

#include "base/error.h"
#include "net/secrets.h"
#include "report/html_text.h"
#include "report/web_files.h"

namespace bough {

std::string inside_script(const Json& data) {
  std::string out;
  for (const char c : dump_line(data)) {
    if (c == '<') out += "\\u003c";
    else out += c;
  }
  return out;
}

std::string run_page(const std::string& title, const Json* data) {
  // The files in the order of CMakeLists.txt: the page, its style, its scripts.
  const std::string_view page = kWebFiles[0], style = kWebFiles[1];
  std::string script;
  for (size_t i = 2; i < std::size(kWebFiles); ++i) script += kWebFiles[i];
  const std::string nonce = random_hex(16);
  std::string out;
  size_t at = 0;
  for (size_t mark; (mark = page.find("{{", at)) != std::string_view::npos;) {
    const size_t end = page.find("}}", mark);
    BOUGH_CHECK(end != std::string_view::npos, "page.html: {{ without }}");
    const std::string_view name = page.substr(mark + 2, end - mark - 2);
    out += page.substr(at, mark - at);
    if (name == "title") out += html_escape(title);
    else if (name == "nonce") out += nonce;
    else if (name == "style") out += style;
    else if (name == "script") out += script;
    else if (name == "data") out += data ? inside_script(*data) : "null";
    else BOUGH_CHECK(false, "page.html: unknown mark ", name);
    at = end + 2;
  }
  return out += page.substr(at);
}

}  // namespace bough
