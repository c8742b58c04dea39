import unittest

from draught import draught


class Draught(unittest.TestCase):
    def test_an_empty_box_floats_high(self):
        self.assertAlmostEqual(draught(mass=1025, length=10, beam=2), 0.05)

    def test_cargo_sinks_it(self):
        self.assertGreater(draught(mass=2000, length=10, beam=2), draught(mass=1000, length=10, beam=2))

    def test_nothing_floats_without_a_hull(self):
        with self.assertRaises(ValueError):
            draught(mass=1, length=0, beam=2)


if __name__ == "__main__":
    unittest.main()
