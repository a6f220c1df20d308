// Converts a plan to the picture of its trees and blocks that report/plan_picture.h draws.
#pragma once

#include <string>

#include "plan/plan.h"
#include "report/plan_picture.h"

namespace bough {

// A node of the picture is a run of tokens that belong to the same sequences and to one plan block. Blocks
// are in the order of their forward passes.
PlanPicture plan_picture(const Plan& plan, const std::string& headline);

}  // namespace bough
