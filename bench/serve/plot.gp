# Latencies over throughput, from a CSV file of bench/serve/load.py:
#   gnuplot -e "csv='load.csv'; svg='load.svg'" bench/serve/plot.gp
if (!exists("csv")) csv = "load.csv"
if (!exists("svg")) svg = "load.svg"
if (!exists("what")) what = "linnet serve"
set datafile separator ","
set datafile columnheaders
set terminal svg size 960,360 font "sans-serif,11" background "white"
set output svg
set multiplot layout 1,3 title what
set xlabel "tokens a second, generated"
set ylabel "ms"
set logscale y
set grid ytics lc rgb "#dddddd"
set key top left
set xrange [0:*]
names = "'time to first token' 'per token after it' 'end to end'"
kinds = "ttft tpot e2e"
do for [i = 1:3] {
    set title word(names, i)
    kind = word(kinds, i)
    plot for [q in "50 90 99"] csv using (column("output_tok_s")):(column(kind . "_p" . q . "_ms")) with linespoints lw 1.5 pt 7 ps 0.6 title "p" . q
}
unset multiplot
