import unittest

from load_line import freeboard


class Freeboard(unittest.TestCase):
    def test_summer(self):
        self.assertEqual(freeboard(9.6, 12.0, "summer"), 12.0 - 9.6)

    def test_a_ship_floats_higher_in_winter(self):
        self.assertGreater(freeboard(9.6, 12.0, "winter"), freeboard(9.6, 12.0, "summer"))

    def test_a_deck_under_water_is_refused(self):
        with self.assertRaises(ValueError):
            freeboard(12.0, 12.0, "summer")


if __name__ == "__main__":
    unittest.main()
