"""The versions with hashes are those without, and complete."""

import re
from importlib.metadata import requires
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = {"embedded", "s3", "gcs", "azure", "arrow"}


def normal(name):
    return re.sub("[-_.]+", "-", name).lower()


def test_every_version_with_a_hash_is_that_of_the_constraints():
    plain = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if "==" in line and not line.startswith("#"):
            name, version = line.split("==")
            plain[normal(name)] = version.strip()
    text = (ROOT / "constraints-hashed.txt").read_text()
    digest = r" \\\n    --hash=sha256:[0-9a-f]{64}"
    hashed = re.findall(rf"^(\S+)==(\S+)(?:{digest}){{1,2}}$", text, re.MULTILINE)
    rest = [line for line in text.splitlines() if not line.startswith(("#", "    --hash="))]
    assert len(hashed) == len(rest)
    assert {normal(name): version for name, version in hashed}.items() <= plain.items()
    direct = {
        normal(re.match(r"[\w.-]+", requirement)[0])
        for requirement in requires("gazette-sdk")
        if "extra ==" not in requirement
        or re.search(r"""extra == ['"](\w+)['"]""", requirement)[1] in EXTRAS
    }
    assert direct <= {normal(name) for name, _ in hashed}, "run scripts/hash-constraints"
    assert "://" not in text
