"""The task: what an answer of the inbox triage looks like, and the checks that grade it.

An answer is {"category": one of CATEGORIES, "needs_human": true or false} and nothing else. A check takes a
case and an output and returns None, or a one-line reason why the output fails. The first that fails names the
failure. The task's digest is over this file, so a change here is visible in every report.
"""

CATEGORIES = ("billing", "delivery", "account", "other")

SCHEMA = {
    "type": "object",
    "properties": {"category": {"type": "string", "enum": list(CATEGORIES)}, "needs_human": {"type": "boolean"}},
    "required": ["category", "needs_human"],
    "additionalProperties": False,
}


def output_fields(case, output):
    """The output has the two fields, of the right types, and no other."""
    if not isinstance(output, dict):
        return f"the output is {type(output).__name__}, not an object"
    if set(output) != {"category", "needs_human"}:
        return f"the fields are {sorted(output)}, not category and needs_human"
    if not (isinstance(output["category"], str) and output["category"] in CATEGORIES):
        return f"category {output['category']!r} is not one of {', '.join(CATEGORIES)}"
    if not isinstance(output["needs_human"], bool):
        return f"needs_human {output['needs_human']!r} is not true or false"
    return None


def failure_criteria(case, output):
    """No failure criterion of the case is met. (Types count: 0 is not false.)"""
    for criterion in case.get("failure_criteria", []):
        value = output.get(criterion["field"])
        if type(value) is type(criterion["equals"]) and value == criterion["equals"]:
            return f"{criterion['field']} is {value!r}: {criterion['why']}"
    return None


def triage_outcome(case, output):
    """The output is the expected answer."""
    for field, expected in case["expected"].items():
        if output[field] != expected:
            return f"{field} is {output[field]!r}, expected {expected!r}"
    return None


CHECKS = (
    ("output-fields", output_fields),
    ("failure-criteria", failure_criteria),
    ("triage-outcome", triage_outcome),
)
