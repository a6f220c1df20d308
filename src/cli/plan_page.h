// The picture of a plan: its trees and blocks as report/plan_picture.h draws them.
#pragma once

#include <string>

#include "plan/plan.h"
#include "report/plan_picture.h"

namespace bough {

// Each node is a run of tokens that the same sequences share and one block holds; blocks in the order of
// their forward passes.
PlanPicture plan_picture(const Plan& plan, const std::string& headline);

}  // namespace bough
