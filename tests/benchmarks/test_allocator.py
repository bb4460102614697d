import allocator


def test_the_allocator_moves_little_in_a_small_cluster():
    found = {each.name: each for each in allocator.figures(600, 12, 3, rounds=1)}
    assert list(found) == [
        "first solution",
        "round without changes",
        "round of exchanges of primaries",
        "solution for a lost broker",
        "moves for a lost broker, what it held = baseline",
        "moves when it is back, what is above fair shares = baseline",
        "most primaries of a broker, an even share and one = baseline",
    ]
    assert all(each.ours > 0 for each in found.values())
    # Times depend on the machine; the numbers of moves do not.
    assert [each.holds for each in found.values() if each.unit == "assignments"] == [True, True]
    assert found["moves for a lost broker, what it held = baseline"].baseline == 150
    most = found["most primaries of a broker, an even share and one = baseline"]
    assert (most.ours, most.holds) == (50, True)
