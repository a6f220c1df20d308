// Calls of an HTTP endpoint, each on a connection of its own: what rewards, environments and engines behind
// endpoints are asked by. Nothing here blocks but the wait for the endpoint at the start.
//
// Redirects are not followed. https is not spoken: what needs it goes through a proxy on this machine.
#pragma once

#include <sys/socket.h>

#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <optional>
#include <string>
#include <utility>

#include "net/line_splitter.h"

namespace bough {

struct HttpUrl {
  std::string host;       // a name or an address, of IPv6 without brackets
  std::string port;       // digits
  std::string target;     // path and query, begins with '/'
  std::string authority;  // host and port as the URL has them
};
// UserError, which begins with `setting`: not http://HOST[:PORT][/PATH].
HttpUrl parse_http_url(const std::string& url, const std::string& setting = "reward");

// A key that goes with every request: the environment's `variable`, or the first line of a file, which the
// setting names. "": there is none. UserError: the file has none.
std::string load_api_key(const char* variable, const std::string& setting, const std::string& file);

struct HttpAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
};

// The first of the host's addresses that accepts a connection, which is closed again. `what` begins messages
// ("reward http://..."). UserError: no such host; IoError: no connection within the limit, which `setting`
// names.
HttpAddress wait_for_endpoint(const std::string& what, const HttpUrl& url, double limit_seconds,
                              const std::string& setting);

struct HttpAnswer {
  enum Kind {
    kAnswered,      // with status, reason and body
    kNotConnected,  // nothing was sent
    kLost,          // the connection broke before the answer was complete
    kMalformed,     // no HTTP, or longer than kMaxReplyBytes
  } kind = kAnswered;
  unsigned status = 0;
  std::string reason, body;
  std::string message;  // of all but 2xx: what happened

  bool is_success() const { return kind == kAnswered && status >= 200 && status < 300; }
  // What the endpoint may answer otherwise at another time.
  bool is_transient() const { return kind == kAnswered && (status >= 500 || status == 429 || status == 408); }
};

// One call at a time.
class HttpCall {
 public:
  // bearer: what "Authorization: Bearer" says; empty: nothing does. An answer of more bytes than max_bytes,
  // taken away ones included, is malformed.
  HttpCall(HttpUrl url, const HttpAddress& address, std::string bearer = "",
           uint64_t max_bytes = kMaxReplyBytes)
      : url_(std::move(url)), address_(address), bearer_(std::move(bearer)), max_bytes_(max_bytes) {}
  ~HttpCall() { hang_up(); }
  HttpCall(const HttpCall&) = delete;
  HttpCall& operator=(const HttpCall&) = delete;

  void post(const std::string& json) { begin("POST", url_.target, json); }
  // `json` empty: no body.
  void begin(const std::string& method, const std::string& target, const std::string& json);
  void hang_up();
  int descriptor() const { return descriptor_; }  // for poll(); -1 while nothing is asked
  bool wants_to_send() const { return descriptor_ >= 0 && !outgoing_.empty(); }
  bool has_failed() const { return error_ != 0; }  // without a descriptor to wait for
  // Sends and receives what can be at once. The answer, when it is complete; nothing while none is asked.
  std::optional<HttpAnswer> advance();
  // What has come of the body of an answer 2xx that is not complete yet, and was not taken: events of a
  // stream. The complete answer has only what is left.
  std::string take_body();

 private:
  void expect_response();
  void send_what_fits();
  boost::system::error_code parse();

  const HttpUrl url_;
  const HttpAddress address_;
  const std::string bearer_;
  const uint64_t max_bytes_;
  int descriptor_ = -1;
  int error_ = 0;  // of the connection
  bool is_connected_ = false;
  std::string outgoing_, incoming_;
  std::optional<boost::beast::http::response_parser<boost::beast::http::string_body>> parser_;
};

}  // namespace bough
