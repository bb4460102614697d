"""The default directory of spools, below a directory that all users of a machine share."""

from __future__ import annotations

import os
import stat
import tempfile

import pytest

from gazette_sdk.broker.spool.directory import make_default_root
from gazette_sdk.errors import ConfigurationError

CLUSTER = (0x1234, "/gazette/cluster", "zone", "broker-1")


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """A temporary directory as /tmp."""
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def root(shared):
    return shared / f"gazette-spools-{os.geteuid()}"


def test_every_part_is_closed_to_other_users(shared, root):
    umask = os.umask(0)
    try:
        made = make_default_root(*CLUSTER)
    finally:
        os.umask(umask)
    assert made.is_relative_to(root)
    while made != shared:
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
        made = made.parent


@pytest.mark.usefixtures("shared")
def test_a_restarted_broker_finds_its_own_again():
    assert make_default_root(*CLUSTER) == make_default_root(*CLUSTER)


@pytest.mark.parametrize(
    "other",
    [
        (0x1235, *CLUSTER[1:]),
        (CLUSTER[0], "/another/prefix", *CLUSTER[2:]),
        (*CLUSTER[:2], "other", "broker-1"),
        (*CLUSTER[:3], "broker-2"),
    ],
)
@pytest.mark.usefixtures("shared")
def test_brokers_and_clusters_do_not_share_one(other):
    assert make_default_root(*other) != make_default_root(*CLUSTER)


def test_names_with_separators_stay_below_the_root(root):
    made = make_default_root(1, "/p", "a/../..", "../x")
    assert made.parent.parent == root


def test_a_symbolic_link_is_refused(shared, root):
    (shared / "of-another").mkdir(mode=0o700)
    root.symlink_to(shared / "of-another")
    with pytest.raises(ConfigurationError, match=r"no directory; set --broker\.spool-dir"):
        make_default_root(*CLUSTER)


def test_a_directory_that_others_may_use_is_refused(root):
    root.mkdir()
    root.chmod(0o750)
    with pytest.raises(ConfigurationError, match="chmod 700"):
        make_default_root(*CLUSTER)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_directory_that_another_user_prepared_is_refused(depth, root):
    made = make_default_root(*CLUSTER)
    prepared = [root, made.parent, made][depth]
    os.chown(prepared, 12345, 12345)
    with pytest.raises(ConfigurationError, match="another user owns it"):
        make_default_root(*CLUSTER)


def test_a_temporary_directory_without_the_sticky_bit_is_refused(shared):
    shared.chmod(0o777)
    with pytest.raises(ConfigurationError, match="may rename"):
        make_default_root(*CLUSTER)
