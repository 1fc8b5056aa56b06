# Linnet's speed over llama.cpp's on the CPU, from a CSV file of bench/peers/cpu.py: medians, with
# the range of the pairs.
#   gnuplot -e "csv='out/cpu.csv'; svg='docs/images/cpu.svg'" bench/peers/cpu.gp
if (!exists("csv")) csv = "cpu.csv"
if (!exists("svg")) svg = "cpu.svg"
set datafile separator ","
set terminal svg size 860,420 font "sans-serif,12" background "white"
set output svg
first(what, column) = system(sprintf("grep ,%s, '%s' | head -n 1 | cut -d, -f%d", what, csv, column))
threads(what) = first(what, 5) . (first(what, 5) eq "1" ? " thread" : " threads")
kind(what) = what eq "decode" ? "decoding, 1 sequence" : what eq "prefill" ? \
             "prompt of " . first(what, 4) . " tokens" : "decoding, " . first(what, 3) . " sequences"
short(file) = system("basename '" . file . "' .gguf")
rows(what) = sprintf("< grep ,%s, '%s'", what, csv)
works = ""
do for [what in "decode prefill batch"] {
    if (first(what, 1) ne "") { works = works . " " . what }
}
set title "Linnet's tokens a second over llama.cpp's, same file and threads"
set ylabel "times as fast as llama.cpp"
set style data histogram
set style histogram errorbars gap 1 lw 1
set style fill solid 0.9
set bars 0.5
set grid ytics lc rgb "#dddddd"
set xtics rotate by -20 noenhanced scale 0
set yrange [0:*]
set key top right
set arrow from graph 0, first 1 to graph 1, first 1 nohead dashtype 2 lc rgb "#444444" front
color(i) = word("#2a6fbb #e08a1e #5aa469", i)
plot for [i = 1:words(works)] rows(word(works, i)) using 8:9:10:xtic(short(strcol(1))) \
    title kind(word(works, i)) . ", " . threads(word(works, i)) lc rgb color(i)
