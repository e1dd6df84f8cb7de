from lean_laguna.plan.bandwidth import bandwidth_of_card, measured_bandwidth


def test_a_card_says_what_it_can_and_what_was_reached():
    found = bandwidth_of_card("gb10")
    assert (found.bytes_per_s, found.reached) == (273e9, 231e9)
    assert "data sheet" in found.origin


def test_this_machine_reads_memory_at_a_plausible_speed():
    found = measured_bandwidth()
    assert 1e8 < found.bytes_per_s < 2e13
    assert found.origin.endswith("measured now")
