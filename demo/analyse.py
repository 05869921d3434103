"""Draw a city's climate from its daily weather: the program of `make demo`.

It stands for what an agent writes: it reads a CSV file, computes with it,
prints what it found and leaves a chart.

usage: analyse.py WEATHER.csv CHART.png
"""

import csv
import sys
from collections import defaultdict
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()


def main(source: str, target: str) -> None:
    rain, high, low = defaultdict(list), defaultdict(list), defaultdict(list)
    years, days = set(), 0
    with open(source, newline="") as f:
        for row in csv.DictReader(f):
            year, month, _ = row["date"].replace("-", "/").split("/")
            years.add(year)
            days += 1
            rain[int(month)].append(float(row["precipitation"]))
            high[int(month)].append(float(row["temp_max"]))
            low[int(month)].append(float(row["temp_min"]))

    months = range(1, 13)
    total = [sum(rain[m]) / len(years) for m in months]
    highs = [fmean(high[m]) for m in months]
    lows = [fmean(low[m]) for m in months]
    wettest, driest = total.index(max(total)), total.index(min(total))

    print(f"{days} days of {len(years)} years")
    print(f"wettest month: {MONTHS[wettest]}, {total[wettest]:.0f} mm; driest: {MONTHS[driest]}, {total[driest]:.0f} mm")
    print(f"mean daily high: {min(highs):.1f} °C to {max(highs):.1f} °C")

    fig, wet = plt.subplots(figsize=(9, 4.8), dpi=110)
    wet.bar(MONTHS, total, color="#8fb8de", label="rain")
    wet.set_ylabel("rain, mm a month")
    warm = wet.twinx()
    warm.plot(MONTHS, highs, color="#c8553d", marker="o", label="mean daily high")
    warm.plot(MONTHS, lows, color="#588b8b", marker="o", label="mean daily low")
    warm.set_ylabel("°C")
    wet.set_xlabel(f"Seattle, {min(years)}–{max(years)}")
    fig.legend(loc="upper center", ncol=3, frameon=False)
    fig.tight_layout(rect=(0, 0, 1, 0.93))
    fig.savefig(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
