// The page of a run: one HTML file with its own style and script (src/report/web/), which loads nothing but
// the data of its own server. `bough view` and a run serve it, report.html is the same page with its data
// inside.
#pragma once

#include <string>

#include "base/json.h"

namespace bough {

// JSON as the content of a <script> element: nothing in it can end the element or begin a comment.
std::string inside_script(const Json& data);

// `data`: the page shows it. nullptr: the page asks its server for the data (view_server.h). The keys of
// `data` are those of /api/snapshot, and `saved`: what /api/step would give, by "RUN/STEP". All text in
// `data` may be adversarial: the data are JSON without '<', and the page shows them as text only.
//
// A Content-Security-Policy admits the page's own style and script by a random nonce, and no other.
std::string run_page(const std::string& title, const Json* data);

}  // namespace bough
