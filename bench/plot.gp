# Decoding speed over batch size, from a CSV file of bench/gpu/run.py:
#   gnuplot -e "csv='out/speed.csv'; svg='docs/images/speed.svg'" bench/plot.gp
if (!exists("csv")) csv = "speed.csv"
if (!exists("svg")) svg = "speed.svg"
if (!exists("prompt")) prompt = 128
set datafile separator ","
set terminal svg size 720,440 font "sans-serif,12" background "white"
set output svg
set title sprintf("Decoding after %d tokens of prompt, Qwen2.5-1.5B's shape, bf16", prompt)
set xlabel "sequences at once"
set ylabel "tokens a second, all together"
set logscale x 2
set logscale y 10
set grid ytics lc rgb "#dddddd"
set key right bottom
set xrange [0.8:320]
engines = system("tail -n +2 '" . csv . "' | grep ,decode, | cut -d, -f1 | awk '!seen[$0]++' | tr ' ' '_' | tr '\\n' ' '")
is(name) = strcol(1) eq name && strcol(2) eq "decode" && column(4) == prompt
plain(name) = system("echo " . name . " | tr _ ' '")
plot for [e in engines] csv using (is(plain(e)) ? column(3) : NaN):5 every ::1 with linespoints \
    lw (e eq "linnet" ? 3 : 1.5) pt 7 ps 0.7 title plain(e)
