"""What `moelab kernels build` and `moelab kernels info` print."""

from __future__ import annotations

import json
import sys
from typing import Any

from moelab.comm import build
from moelab.comm.library import SIGNATURES
from moelab.config import MoelabError


def build_kernels(as_json: bool) -> None:
    """The path of the library, or with JSON all that is known of its build."""
    recipe = build.recipe()
    if recipe.find():
        print("already built", file=sys.stderr)
    built = build.build(recipe, say=lambda text: print(text, file=sys.stderr, flush=True))
    print(json.dumps({"library": str(built.library), **built.facts}, indent=2) if as_json else built.library)


def info(as_json: bool) -> None:
    found = _info()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        if isinstance(value, bool):
            value = "yes" if value else "no"
        elif isinstance(value, list):
            value = ", ".join(value) or "none"
        if value is not None:
            print(f"{name.replace('_', ' '):<15}  {value}")


def _info() -> dict[str, Any]:
    """What would be built and what is; `problem` says why nothing can be, null if all is well."""
    problem = recipe = built = None
    try:
        recipe = build.recipe()
    except MoelabError as error:
        problem = str(error)
    try:
        built = build.find()
    except MoelabError:
        pass  # the same that `recipe` said
    facts = built.facts if built else {}
    return {
        "problem": problem,
        "built": built is not None,
        "key": built.facts["key"] if built else recipe.key if recipe else None,
        "library": str(built.library if built else recipe.folder / build.LIBRARY) if built or recipe else None,
        "sources": [path.name for path in recipe.sources] if recipe else None,
        "folder": str(recipe.sources[0].parent) if recipe else None,
        "arch": build.ARCH,
        "nvcc": facts.get("nvcc") or (recipe.nvcc.version if recipe else None),
        "nvcc_path": str(recipe.nvcc.path) if recipe else None,
        "nvshmem": facts.get("nvshmem") or (recipe.nvshmem.version if recipe else None),
        "nvshmem_home": facts.get("nvshmem_home") or (str(recipe.nvshmem.home) if recipe else None),
        "seconds": facts.get("seconds"),
        "exports": facts.get("exports"),
        "exports_missing": sorted(SIGNATURES.keys() - set(facts["exports"])) if built else None,
    }
