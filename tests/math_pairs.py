r"""Final answers with references: right ones and wrong ones, of the forms that MATH, AIME and GSM8K have."""

RIGHT = r"""
4 | 4
4. | 4
+5 | 5
\boxed{4} | 4
\fbox{4} | 4
\mathbf{4} | 4
{4} | 4
\tfrac{1}{2} | \frac{1}{2}
\dfrac12 | 0.5
\cfrac{1}{2} | 1/2
\frac1{2} | .5
\frac{-1}{2} | -\frac{1}{2}
-\frac{3}{4} | -0.75
\frac{3}{-4} | -.75
1 \frac{1}{2} | \frac{3}{2}
\frac{3}{2} | 1\frac{1}{2}
-2\frac{3}{4} | -\frac{11}{4}
2\dfrac{1}{3} | 7/3
3½ | 3.5
\$1,000 | 1000
\$ 1{,}234.50 | 1234.5
1\,000 | 1000
1\,234\,567 | 1,234,567
1000 | 1,\!000
11,\! 111,\! 111,\! 100 | 11111111100
10 000 | 10000
3e8 | 300000000
1.5E-3 | 0.0015
3 \times 10^8 | 300000000
3\cdot10^{-2} | 0.03
2.5\times 10^{3} | 2500
10^{10} | 10000000000
2^10 | 1024
2^{-3} | \frac18
0.\overline{3} | \frac{1}{3}
0.1\overline{6} | 1/6
0.\overline{142857} | \frac17
0.333333 | \frac{1}{3}
6.283185 | 2\pi
2\pi | 6.283185
1.41421356 | \sqrt2
\sqrt[3]{8} | 2
\sqrt{12} | 2\sqrt{3}
\frac{\sqrt{2}}{2} | \frac{1}{\sqrt 2}
\frac{1+\sqrt5}{2} | \frac{\sqrt{5}+1}{2}
\sqrt{3+2\sqrt{2}} | 1+\sqrt{2}
\sqrt[4]{4} | \sqrt2
\sqrt{-4} | 2i
\log_2 8 | 3
\log_{3}{9} | 2
\log 100 | 2
\ln e^2 | 2
\ln(8) | 3\ln 2
5! | 120
\binom{5}{2} | 10
\dbinom{n}{1} | n
{5 \choose 2} | 10
\lfloor 2.5 \rfloor | 2
\left\lceil 2.5 \right\rceil | 3
|-4| | 4
\left|3-5\right| | 2
\gcd(12, 18) | 6
\cos 60^\circ | \frac12
\cos(60^{\circ}) | 0.5
\sin\frac{\pi}{6} | 1/2
\tan 45° | 1
\sin^2 x + \cos^2 x | 1
\sin^{-1}(1) | \frac{\pi}{2}
2\sin x\cos x | \sin 2x
\arctan 1 | \pi/4
e^{i\pi} | -1
3+2\mathrm{i} | 3+2i
2\text{i}+3 | 3+2i
(1+i)^2 | 2i
1-\frac{1}{\mathrm{e}} | 1-\frac1e
\text{e} | e
\mathrm{e}^{2} | e^2
x^2+2x+1 | (x+1)^2
(x+2)(x+3) | x^2+5x+6
\frac{x^2-1}{x-1} | x+1
-(x-5) | 5-x
2ab | ab\cdot 2
x_1+x_2 | x_{2}+x_{1}
\alpha\beta | \beta \alpha
a^{m}a^{n} | a^{m+n}
n(n+1)/2 | \frac{n^2+n}{2}
(-\infty, 3) | (-\infty,3)
x \in (-\infty,3) | (-\infty,3)
x<3 | (-\infty,3)
3>x | x<3
-1\le x<2 | [-1,2)
x \geq 2 | [2,\infty)
2x<6 | x<3
x^2<4 | (-2,2)
x<1 \text{ or } x>3 | (-\infty,1)\cup(3,\infty)
x>1 \text{ and } x<3 | (1,3)
\{x \mid x>1\} | (1,\infty)
(3,\infty) \cup (-\infty,1) | (-\infty,1) \cup (3,\infty)
\left(-\infty, \infty\right) | \mathbb{R}
\mathbb{R} \setminus \{0\} | (-\infty,0)\cup(0,\infty)
x \neq 0 | (-\infty,0)\cup(0,+\infty)
[0,\sqrt{8}] | [0,2\sqrt{2}]
\varnothing | \emptyset
\{\} | \emptyset
∅ | \varnothing
\infty | +\infty
\{1,2\} | \{2,1\}
\\{1,2\\} | \{1, 2\}
\left\{ 1, \frac12 \right\} | \{0.5, 1\}
\{1,2,3\} | 3,2,1
1,2 | 2, 1
1 \text{ and } 2 | 1,2
1, 2, and 3 | 1,2,3
1, 2, \text{ and } 3 | 3, 2, 1
x=1, x=2 | 1,2
x=1 \text{ or } x=2 | 1,2
x=1 or 2 | 1, 2
-2, 2 | \pm 2
x = \pm 2 | -2,2
1 \pm \sqrt{19} | 1+\sqrt{19}, 1-\sqrt{19}
\boxed{1} \text{ and } \boxed{2} | 1, 2
(1,2) | (1, 2)
\left( 3, \frac{\pi}{2} \right) | (3, \pi/2)
\langle 1,2,3\rangle | (1,2,3)
(1,2),(3,4) | (3,4),(1,2)
\{(1,2),(3,4)\} | (3,4), (1,2)
x=1,y=2 | (1,2)
y=2, x=1 | (1,2)
(x,y)=(1,2) | (1,2)
(x, y, z) = (1, 2, 3) | x=1, y=2, z=3
f(x)=2x | 2x
y=2x+1 | y=2x+1
y-2x=1 | y=2x+1
2y=4x+2 | y=2x+1
2x+1 | y=2x+1
x^2+y^2=4 | y^2 + x^2 - 4 = 0
5=x | 5
x=2+3=5 | 5
\frac{6}{4}=\frac32 | 1.5
2\pi \approx 6.28 | 2\pi
\approx 4.2 | 4.2
\theta=\frac{\pi}{4} | \frac{\pi}{4}
AB = 5 | 5
\angle ABC = 60^\circ | 60^\circ
\text{Area} = 12 | 12
P(A)=\frac12 | 0.5
\begin{bmatrix} 1 \\ 3 \end{bmatrix} | \begin{pmatrix} 1 \\ 3 \end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \left[\begin{array}{cc}1&2\\3&\frac{8}{2}\end{array}\right]
\frac12\begin{pmatrix}2\\4\end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix}
\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix} | \begin{pmatrix} 1 \\ 2 \end{pmatrix}
101_2 | 101_2
101_{2} | 101_2
(101)_2 | 101_{2}
101_{\text{two}} | 101_2
4_5 | 4_{5}
0101_2 | 101_2
1A_{16} | 1A_{16}
\mathrm{BAD}_{16} | BAD_{16}
3:2 | 3:2
6:4 | 3:2
3:2 | \frac{3}{2}
10\text{ cm}^2 | 10
10\,\mathrm{cm} | 10
10 cm | 10
10 | 10\text{ cm}
10\text{ cm} | 10 \mathrm{~cm}
10 \text{ square centimeters} | 10 \text{ cm}^2
5 \text{ dollars} | \$5
\$5 | 5
5 \text{ miles per hour} | 5
3 \text{ apples} | 3
12 inches | 12
4\text{th} | 4
4^{\text{th}} | 4
21st | 21
2 \text{ million} | 2000000
1.5 million | 1500000
3 \text{ dozen} | 36
90^\circ | 90
90 \text{ degrees} | 90^\circ
50\% | 50
50 | 50\%
50 \text{ percent} | 50\%
0.5 | 50\%
12.5\% | \frac18
\text{Evelyn} | \text{Evelyn}
Evelyn | \text{Evelyn}
\text{evelyn} | \text{Evelyn}
\text{(A)} | \text{A}
\textbf{(A)} | A
\mathrm{(A)} | \text{(A)}
(A) | A
\text{odd} | \text{odd}
odd | \text{odd}
\text{an ellipse} | \text{ellipse}
\text{No solution} | \text{no solution}
yes | Yes
\text{the number } 4 | 4
\text{The answer is } 4 | 4
\text{n = 4} | 4
\text{4} | 4
\text{4 and 5} | 5, 4
５ | 5
−3 | -3
x² | x^2
√2 | \sqrt{2}
2×3 | 6
\tfrac{1}{2}, \ \tfrac{3}{2} | \{ \frac{3}{2}, \frac{1}{2} \}
\left.\frac12\right. | \frac12
\displaystyle\frac{1}{2} | 1/2
\text{June 20} | \text{June 20}
1/2^{98} | 2^{-98}
\frac{10!}{8!} | 90
\sqrt{x^2} | \left|x\right|
\$18.90 | 18.9
$4$ | 4
-\infty<x<3 | (-\infty,3)
\left[\frac12,1\right) | \frac12\le x<1
9.8\,\mathrm{m/s^2} | 9.8
5 \text{ m} | 5
x=\frac{1\pm\sqrt5}{2} | \frac{1+\sqrt5}{2},\frac{1-\sqrt5}{2}
\frac{x^2}{4}+\frac{y^2}{9}=1 | 9x^2+4y^2=36
\mathbf{a}\times\mathbf{b} | \mathbf{a}\times\mathbf{b}
3\times 10^8\,\mathbf{i} | 3\cdot 10^8\mathbf{i}
\mathbf{a}\cdot\mathbf{b} | \mathbf{b}\cdot\mathbf{a}
a\times b | ab
\max(x,y)+1 | 1+\max(y,x)
(x+1)(x+2)<0 | (-2,-1)
\sum_{k=1}^n k | \sum_{k=1}^{n} k
\mathbb Z^+ | \mathbb{Z}^{+}
\int_{0}^{1} x^{3} dx | \int_0^1 x^3\,dx
1,2,\cdots,n | 1, 2, \ldots, n
\begin{cases} x & x>0 \\ 0 & x\leq 0\end{cases} | \left\{\begin{array}{ll} x & x>0 \\ 0 & x\leq 0\end{array}\right.
\{z : |z|=1\} | \{z \mid |z|=1\}
\textbf{(B)}\ 12 | B
\textbf{(B)}\ 12 | 12
\textbf{(B) }12 | \text{(B)}
\textbf{(B)} -\frac{3}{4} | -0.75
\textbf{(B)}\ \$12 | 12
(B) 12 | \textbf{(B)}\ 12
(B) 12 | B
(B) 12 | 12
1 1/2 | 1.5
-2 3/4 | -2.75
1 1/2 \text{ cups} | \frac32
2:15 \text{ p.m.} | 2:15 \text{ PM}
2:15 p.m. | 2:15 PM
10:05 am | 10:05\text{ A.M.}
60 \text{ km/h} | 60 \text{ kmh}
60 \text{ miles per hour} | 60 \text{ mph}
60 \text{ km per hour} | 60 \text{ km/h}
4^{th} | 4
2^{nd} | 2
3^{\text{rd}} | 3
11^{th} | 11
_5C_2 | 10
{}_{10}C_{3} | 120
"""
"""Answers in a box, and references, with which they are equal."""

WRONG = r"""
4, 5 | 4
4 or 5 | 4
4 \text{ or } 5 | 4
4 \text{ and } 5 | 4
4; 5 | 5
\{4,5\} | 4
\{4\} | 5
4=5 | 4
4=5 | 5
1=2=3=4=5 | 3
1=2=3=4=5 | 5
x=4=5 | 5
x=4,5 | 4
x=4,5 | 5
4 \to 5 | 4
4 \to 5 | 5
4..5 | 4
4..5 | 5
4...5 | 5
4 \ldots 5 | 4
4, \ldots, 5 | 5
4-5 | 5
1$ $2$ $3 | 1
1$ $2$ $3 | 3
1$ or $2 | 2
\boxed{4}5 | 4
\boxed{4}5 | 5
\boxed{4}\boxed{5} | 5
3 \pm 1 | 4
\pm 4 | -4
\pm 4 | 4
\approx 4.2 | 4
4 \approx 5 | 4
4 \approx 5 | 5
\pi \approx 3.2 | \pi
4.0000004 | 4
0.0000001 | 0
1/10000000 | 0
0.000000 | \frac{1}{2^{98}}
1/2^{98} | 1/2^{99}
\frac{1}{10^{40}} | 0
10^{40}+1 | 10^{40}
1.0000001 | 1
\sqrt{2}+10^{-40} | \sqrt2
0.3333 | \frac13
3.14159 | \pi
3.14 | \pi
\frac{22}{7} | \pi
0.\overline{3} | 0.3
0.\overline{3} | 0.33
0.\overline{9} | 0.9
x | 4
a | b
x | X
4 \text{ (or } 5) | 4
4 \text{ (or } 5 \text{)} | 5
4 \text{ not } 5 | 4
\text{not } 4 | 4
\text{not 4} | 4
4 \text{ is wrong} | 4
4 \text{ or more} | 4
4 \text{ at most} | 4
\text{at least } 4 | 4
\text{more than 4} | 4
4 \text{ squared} | 4
4 \text{ thousand} | 4
4 \text{ million} | 4
4 \text{ and a half} | 4
4 \text{ halves} | 4
4\text{ to }5 | 4
4 \text{ if } x>0 | 4
\text{negative } 4 | 4
\text{minus } 4 | 4
4 \neq 5 | 4
4 \neq 5 | 5
x \neq 4 | 4
x>4 | 4
x=4 | x>4
x<4 | x>4
x\le 4 | x<4
4<x | x<4
x<3 | (-\infty,3]
x>3 | (-\infty,3)
x<3 | (-\infty,4)
y<3 | x<3
[4,5] | (4,5)
(4,5] | [4,5)
(4,5) | [4,5)
(4,5) | 4,5
[4,5] | 4,5
(1,2) \cup (3,4) | (1,2)
(1,2) \cap (3,4) | (1,2) \cup (3,4)
(-\infty,\infty) | \mathbb{Z}
\mathbb{R} | \mathbb{R}\setminus\{0\}
\emptyset | 0
\emptyset | \{0\}
\{0\} | \emptyset
4 5 | 45
4 5 | 20
4 5 | 4
{4}5 | 45
4{5} | 45
|4| | -4
4_{5} | 4
4 | 4_5
101 | 101_2
101_2 | 101
5 | 101_2
101_2 | 5
101_3 | 101_2
101_{2} | 1010_2
110_2 | 101_2
101_2 | 101_{10}
1A_{16} | 1B_{16}
\text{A} | \text{B}
A, B, C, D | B
\text{A or B} | \text{A}
\text{A, B} | \text{A}
(A)(B) | A
\text{yes} | \text{no}
\text{yes and no} | \text{yes}
\text{Not enough} | \text{enough}
\text{not odd} | \text{odd}
\text{Evelyn or Carla} | \text{Evelyn}
\text{east} | \text{west}
\text{Monday} | \text{Tuesday}
\text{a} | \text{b}
\infty | -\infty
-\infty | \infty
0/0 | 0
\frac{1}{0} | 0
\frac{1}{0} | \infty
\text{NaN} | 0
nan | 4
\begin{cases}4\\5\end{cases} | 4
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}2\\1\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1&2\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&2\\3&5\end{pmatrix}
\begin{pmatrix}4\end{pmatrix}5 | 4
\begin{pmatrix}1\\2\end{pmatrix} | 1,2
(1,2,3) | (1,2)
(1,2) | (1,2,3)
1,2 | (1,2)
1,2 | (2,1)
(2,1) | (1,2)
(2,1) | \{1,2\}
(1,2) | \{1,2\}
[1,2] | \{1,2\}
\{1,2\} | (1,2)
\{1,1,2\} | \{1,2\}
\{1,2\} | \{1,1,2\}
1,1,2 | 1,2
1,2,2 | 1,1,2
\{1,2\} | \{1,2,3\}
\{1,2,3\} | \{1,2\}
(1,2),(3,4) | (1,2,3,4)
(2,1),(4,3) | (1,2),(3,4)
\sin x | \cos x
\sin 30 | \frac12
\cos 60 | \frac12
\sin^2 x | \sin x^2
e^{i\pi} | 1
\log 2 | \ln 2
3+2\mathrm{i} | 5
3+2\mathrm{i} | 3+2
3+2i | 3-2i
2\mathrm{i} | 2
1-\frac{1}{\mathrm{e}} | 1
1-\frac{1}{\mathrm{e}} | 0
\text{e} | 1
2\text{e} | 2
2e | 2
y=2x | 2y=x
y=2x | y=2x+1
x=5 | y=5
f(x)=x | x+1
x+1=5 | 5
xy=5 | 5
x=1,y=2 | (2,1)
x=2,y=1 | 1,2
x=1,y=2 | x=2,y=1
10 cm | 10 m
10 \text{ cm} | 10 \text{ m}
10 \text{ cm}^2 | 10 \text{ cm}
10 \text{ cm}^2 | 10 \text{ cm}^3
10 \text{ apples} | 10 \text{ pears}
\$10 | 10 \text{ cents}
10 \text{ km/h} | 10 \text{ m/s}
10^\circ | 10 \text{ radians}
10 \text{ hours} | 10 \text{ minutes}
1,2 | 12
1,234 | 234
1,2,3 | 123
1{,}2 | 1.2
1{,}2 | 12
1.2.3 | 1.2
1.2.3 | 123
\frac{1}{2} | 2
\frac{1}{2} | 0.51
1\frac12 | \frac12
2\sqrt{3} | 23
\sqrt{3} | \sqrt{12}
x^2+2x | (x+1)^2
x^2 | x^3
2x | 2y
2^{10} | 210
2^3^4 | 4096
3:2 | 2:3
3:2 | 3
2:15 | 4:30
3:2 | (3,2)
50\% | 5
5\% | 50\%
0.5\% | 50\%
50\% | 0.05
4? | 4
?4 | 4
4\text{?}5 | 4
4/ | 4
4+ | 4
4\times | 4
= | 4
4 \text{ wins }5 | 4
4\foo5 | 4
\foo{4} | 4
\foo 4 | 4
4\phantom{5} | 4
4\not | 4
4 \mod 5 | 4
4 \equiv 5 | 4
4 \pmod{5} | 4
4 \mid 8 | 4
4 \text{ divides } 8 | 4
4 \in \{4,5\} | 4
4 \oplus 5 | 4
4 \% 5 | 4
4!! | 24
4^\circ 5 | 4
4^\circ 30' | 4
4' | 4
\overline{4} | 4
\overline{45} | 45
\hat{4} | 4
\sum_{i=1}^{4} i | 4
\int_0^4 dx | 5
\lim_{x\to 4} x | 5
9^{9^{9^{9}}} | 4
(10^9)! | 4
\begin{array}{c}4\\5\end{array} | 4
\underline{4}5 | 4
\cancel{5}4 | 4
\color{red}4 | 5
4 \\ 5 | 4
4 \& 5 | 4
4 # 5 | 4
4 @ 5 | 4
4 ~ 5 | 4
4_ | 4
4\mathrm{x} | 4
4\text{k} | 4
4\text{M} | 4
\boxed{1}\boxed{2} | 2
2\boxed{2} | 4
3\rightarrow 4 | 4
12_7 | 12_8
4^{\circ}\text{C} | 4^{\circ}\text{F}
4\text{ AM} | 4\text{ PM}
x=2 \text{ (reject } x=-2) | 2
\max(4,5) | 4
\mathbf{a}\cdot\mathbf{b} | \mathbf{a}\times\mathbf{b}
\mathbf{b}\times\mathbf{a} | \mathbf{a}\times\mathbf{b}
\mathbf{a}\mathbf{b} | \mathbf{a}\times\mathbf{b}
\vec a\cdot\vec b | \vec a\times\vec b
\hat{\imath}\hat{\jmath} | \hat{\imath}\times\hat{\jmath}
\overrightarrow{AB}\cdot\overrightarrow{CD} | \overrightarrow{AB}×\overrightarrow{CD}
ab | \bm{a}\times\bm{b}
\max(x,y) | \min(x,y)
(x+1)^{200}<0 | x<3
4=5 | \gcd(a,b)=1
1 | \gcd(a,b)=1
5 | \det A = 5
B \cup C | A \cup B
A \cap B | A \cup B
\mathbb{Z} | \mathbb{Z}^+
\mathbb{Z}^- | \mathbb{Z}^+
n \mid m | m \mid n
(1,2,n) | (1,2,\ldots,n)
(1,2,\ldots,n) | 1,2,\ldots,n
n \geq 1 | \forall n \geq 1
\sum_{k=1}2 k | \sum_{k=12} k
\int \frac{12}{3} dx | \int \frac{1}{2}3 dx
\int x^{12} dx | \int x^{1}2 dx
\begin{cases} x & x>0 \\ 1 & x\leq 0\end{cases} | \left\{\begin{array}{ll} x & x>0 \\ 0 & x\leq 0\end{array}\right.
\{z : |z|=2\} | \{z : |z|=1\}
(B) 12 | A
(B) 12 | 13
\textbf{(B)}\ 12 | C
\textbf{(B)}\ 12 | \textbf{(C)}\ 12
\textbf{(B)}\ 12 | \textbf{(B)}\ 13
\textbf{(B)}\ 12 \text{ or } \textbf{(C)}\ 13 | B
\textbf{(B)}\ 12 \text{ or } \textbf{(C)}\ 13 | C
\textbf{(B)}\ 12 \text{ or } 13 | B
\textbf{(B)}\ 12 \textbf{(C)} | B
\textbf{(B)}\ C | C
\textbf{(B)}\ C | B
\textbf{(B)}\ 12 \text{ C} | C
\textbf{(B)}, \textbf{(C)} | B
\textbf{(B)} - \textbf{(C)} | B
(B) 4=5 | B
(B) - 1 | B
1 1/2 | 5.5
1 1/2 | 0.5
1 1/2 | \frac{11}{2}
1 3/2 | 2.5
1 1/2 x | \frac{x}{2}
1 1/2/2 | 0.75
1 1 1/2 | 2.5
2:15 \text{ a.m.} | 2:15 \text{ p.m.}
4:30 \text{ PM} | 2:15 \text{ PM}
2:15 \text{ PM} | 14:15
60 \text{ km/h} | 60 \text{ mph}
60 \text{ km/h} | 60 \text{ km}
4^{st} | 4
2^{rd} | 2
e^{st} | e
x^{th} | x
4^{th} 5 | 4
_5C_3 | _5C_1
"""
"""Answers in a box, and references, with which they are not equal."""


def pairs(table: str) -> list[tuple[str, str]]:
    """Return the answers in boxes and the references of a table."""
    lines = [line.rpartition(" | ") for line in table.strip().splitlines()]
    return [(rf"\boxed{{{answer}}}", reference) for answer, _, reference in lines]
