// POSTs of JSON to an HTTP endpoint, each on a connection of its own: what rewards and environments behind
// endpoints are asked by. Nothing here blocks but the wait for the endpoint at the start.
//
// Redirects are not followed. https is not spoken: what needs it goes through a proxy on this machine.
#pragma once

#include <sys/socket.h>

#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <optional>
#include <string>

namespace bough {

struct HttpUrl {
  std::string host;       // a name or an address, of IPv6 without brackets
  std::string port;       // digits
  std::string target;     // path and query, begins with '/'
  std::string authority;  // host and port as the URL has them
};
// UserError, which begins with `setting`: not http://HOST[:PORT][/PATH].
HttpUrl parse_http_url(const std::string& url, const std::string& setting = "reward");

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

// One POST at a time.
class HttpPost {
 public:
  HttpPost(HttpUrl url, const HttpAddress& address) : url_(std::move(url)), address_(address) {}
  ~HttpPost() { hang_up(); }
  HttpPost(const HttpPost&) = delete;
  HttpPost& operator=(const HttpPost&) = delete;

  void begin(const std::string& json);
  void hang_up();
  int descriptor() const { return descriptor_; }  // for poll(); -1 while nothing is asked
  bool wants_to_send() const { return descriptor_ >= 0 && !outgoing_.empty(); }
  bool has_failed() const { return error_ != 0; }  // without a descriptor to wait for
  // Sends and receives what can be at once. The answer, when it is complete; nothing while none is asked.
  std::optional<HttpAnswer> advance();

 private:
  void expect_response();
  void send_what_fits();
  boost::system::error_code parse();

  const HttpUrl url_;
  const HttpAddress address_;
  int descriptor_ = -1;
  int error_ = 0;  // of the connection
  bool is_connected_ = false;
  std::string outgoing_, incoming_;
  std::optional<boost::beast::http::response_parser<boost::beast::http::string_body>> parser_;
};

}  // namespace bough
